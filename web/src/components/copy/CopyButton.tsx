import { Button, type ButtonProps } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

const SHOWN_MS = 2000;

/** Copies a text and confirms it; if the browser refuses, it asks the user to copy by hand. */
export function CopyButton({ text, ...look }: { text: string } & ButtonProps) {
  const { t } = useTranslation();
  const [was, setWas] = useState<"copied" | "refused">();
  const copy = async () => {
    setWas((await wasCopied(text)) ? "copied" : "refused");
    setTimeout(() => setWas(undefined), SHOWN_MS);
  };
  return (
    <Button variant="default" {...look} onClick={() => void copy()} aria-live="polite">
      {was === undefined ? t("Copy") : was === "copied" ? t("Copied") : t("Select and copy by hand.")}
    </Button>
  );
}

/** Return whether the text was copied. Pages without TLS support only the old, deprecated method. */
async function wasCopied(text: string): Promise<boolean> {
  if (navigator.clipboard !== undefined) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.setAttribute("aria-hidden", "true");
  field.style.position = "fixed"; // the page does not scroll to it
  const before = document.activeElement;
  document.body.append(field);
  field.select();
  const was = document.execCommand("copy");
  field.remove();
  if (before instanceof HTMLElement) before.focus();
  return was;
}
