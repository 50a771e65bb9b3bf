import { Button, Group, Modal, Stack, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { deployment as deploymentQuery } from "../../api/queries";
import { useMay, useOwns } from "../../api/scopes";
import type { Deployment } from "../../api/types";
import { ConfirmButton } from "../../components/ConfirmButton";
import { Failure } from "../../components/Feedback";
import { ButtonLink } from "../../components/links";

/** Open the playground, change the number of replicas, or stop the deployment. */
export function Actions({ deployment }: { deployment: Deployment }) {
  const { t } = useTranslation();
  const [scales, scaling] = useDisclosure(false);
  const takeIn = useTakeIn(deployment);
  const isOurs = useOwns(deployment.owner);
  const mayTalk = useMay("chat");
  const talk = mayTalk && (
    <ButtonLink to="/playground" search={{ with: deployment.name }}>
      {t("Talk to it")}
    </ButtonLink>
  );
  if (!isOurs) return talk;
  return (
    <>
      {talk}
      <Button variant="default" onClick={scaling.open}>
        {t("Scale")}
      </Button>
      <ConfirmButton
        action={t("Take down")}
        question={t("Take {{name}} down?", { name: deployment.name })}
        onConfirm={async () =>
          takeIn(
            await body(api.DELETE("/api/v1/deployments/{deployment}", { params: { path: { deployment: deployment.id } } })),
          )
        }
      >
        {t("Requests that it is answering end with an error. Its machines and its name are free at once; the model's files stay.")}
      </ConfirmButton>
      <Modal opened={scales} onClose={scaling.close} title={t("Scale {{name}}", { name: deployment.name })} centered closeButtonProps={{ "aria-label": t("Close") }}>
        <Scale deployment={deployment} close={scaling.close} />
      </Modal>
    </>
  );
}

interface Props {
  deployment: Deployment;
  close: () => void;
}

function useTakeIn(deployment: Deployment) {
  const client = useQueryClient();
  return (changed: Deployment) => client.setQueryData(deploymentQuery(deployment.name).queryKey, changed);
}

function Scale({ deployment, close }: Props) {
  const { t } = useTranslation();
  const before = deployment.spec.replicas;
  const [min, setMin] = useState(String(before.min));
  const [max, setMax] = useState(String(before.max));
  const takeIn = useTakeIn(deployment);
  const changing = useMutation({
    mutationFn: () =>
      body(
        api.PATCH("/api/v1/deployments/{deployment}", {
          params: { path: { deployment: deployment.id } },
          // The range in the format of the command line; other options of the replicas are kept.
          body: { replicas: `${Number(min)}..${Number(max)}` },
        }),
      ),
    onSuccess: (changed) => {
      takeIn(changed);
      close();
    },
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    changing.mutate();
  };
  return (
    <form onSubmit={submit}>
      <Stack>
        <Text size="sm">{t("Between these it follows the requests. With fewest 0 its machines are free while nobody asks.")}</Text>
        <Group grow>
          <TextInput
            label={t("Fewest replicas")}
            type="number"
            min={0}
            required
            data-autofocus
            value={min}
            onChange={(event) => setMin(event.currentTarget.value)}
          />
          <TextInput
            label={t("Most replicas")}
            type="number"
            min={1}
            required
            value={max}
            onChange={(event) => setMax(event.currentTarget.value)}
          />
        </Group>
        {changing.error !== null && <Failure error={changing.error} />}
        <Group justify="end">
          <Button variant="default" onClick={close}>
            {t("Leave it")}
          </Button>
          <Button type="submit" loading={changing.isPending}>
            {t("Scale")}
          </Button>
        </Group>
      </Stack>
    </form>
  );
}
