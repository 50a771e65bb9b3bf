/** Results of the probe: devices, and links to the server and to other machines. */
import { Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { cluster } from "../../api/queries";
import type { Machine } from "../../api/types";
import { MachineLink } from "../../components/MachineLink";
import { bytes, latency, si } from "../../format";
import { qualityOf } from "../../cluster/layout";
import { qualityWords } from "../../cluster/words";

const DTYPES = ["float32", "bfloat16", "float16"] as const;

export function Devices({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const { capacity } = machine;
  if (capacity === null) {
    return (
      <Text size="sm" c="dimmed">
        {t("Not measured yet.")}
      </Text>
    );
  }
  return (
    <div className="scroll">
      <Table className="stacking" aria-label={t("Devices")}>
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Device")}</Table.Th>
            {DTYPES.map((dtype) => (
              <Table.Th key={dtype} className="numeric">
                {dtype}
              </Table.Th>
            ))}
            <Table.Th className="numeric">{t("Memory lent")}</Table.Th>
            <Table.Th className="numeric">{t("Memory bandwidth")}</Table.Th>
            <Table.Th className="numeric">{t("Small operation")}</Table.Th>
            {capacity.length > 1 && <Table.Th className="numeric">{t("Sums with the others")}</Table.Th>}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {capacity.map((device, place) => (
            <Table.Tr key={place}>
              <Table.Td data-label={t("Device")}>
                <Text size="sm">
                  {device.name || device.kind} ({device.kind})
                </Text>
              </Table.Td>
              {DTYPES.map((dtype) => {
                const speed = device.flops_per_s?.[dtype];
                return (
                  <Table.Td key={dtype} className="numeric" data-label={dtype}>
                    {speed === undefined ? "–" : si(speed, "FLOP/s")}
                  </Table.Td>
                );
              })}
              <Table.Td className="numeric" data-label={t("Memory lent")}>
                {bytes(device.memory_bytes)}
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Memory bandwidth")}>
                {device.memory_bytes_per_s ? si(device.memory_bytes_per_s, "B/s") : "–"}
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Small operation")}>
                {device.overhead_s ? `${(device.overhead_s * 1e6).toFixed(1)} µs` : "–"}
              </Table.Td>
              {capacity.length > 1 && (
                <Table.Td className="numeric" data-label={t("Sums with the others")}>
                  {device.peer_bytes_per_s && device.peer_latency_s
                    ? `${si(device.peer_bytes_per_s, "B/s")}, ${latency(device.peer_latency_s)}`
                    : "–"}
                </Table.Td>
              )}
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

export function MeasuredLinks({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const { data } = useQuery(cluster);
  const links = machine.links ?? [];
  if (links.length === 0) return null;
  const names = new Map(data?.machines.map((other) => [other.id, other.name]));
  return (
    <div className="scroll">
      <Table className="stacking" aria-label={t("Links")}>
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Link to")}</Table.Th>
            <Table.Th className="numeric">{t("Latency, one way")}</Table.Th>
            <Table.Th className="numeric">{t("Bandwidth")}</Table.Th>
            <Table.Th>{t("Quality")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {links.map((link) => {
            const other = link.source === machine.id ? link.target : link.source;
            const isDead = link.bytes_per_s === 0;
            return (
              <Table.Tr key={`${link.source} ${link.target}`}>
                <Table.Td data-label={t("Link to")}>
                  {other === "head" ? (
                    <Text size="sm">{t("the server")}</Text>
                  ) : (
                    <MachineLink id={other} name={names.get(other) ?? other} />
                  )}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Latency, one way")}>
                  {isDead ? "–" : latency(link.latency_s)}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Bandwidth")}>
                  {isDead ? "–" : si(link.bytes_per_s, "B/s")}
                </Table.Td>
                <Table.Td data-label={t("Quality")}>
                  <Text size="sm">{isDead ? t("cut off") : qualityWords(t, qualityOf(link.bytes_per_s))}</Text>
                </Table.Td>
              </Table.Tr>
            );
          })}
        </Table.Tbody>
      </Table>
    </div>
  );
}
