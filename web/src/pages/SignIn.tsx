import { Button, PasswordInput, Stack, Text, Title } from "@mantine/core";
import { useDocumentTitle } from "@mantine/hooks";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useEffect, useState, type FormEvent } from "react";
import { useTranslation } from "react-i18next";

import { ApiProblem } from "../api/problem";
import { signIn } from "../api/session";
import { sentence } from "../components/Feedback";
import classes from "./SignIn.module.css";

/** Shown instead of any page while no user is signed in; the URL is kept, so that the page opens after signing in. */
export function SignIn({ why }: { why: "refused" | "over" | undefined }) {
  const { t } = useTranslation();
  useDocumentTitle(`${t("Sign in")} · share-compute`);
  const client = useQueryClient();
  // Clears the cache, so that the next user sees no data of the previous one.
  useEffect(() => client.clear(), [client]);
  const [key, setKey] = useState("");
  const attempt = useMutation({ mutationFn: () => signIn(key.trim()) });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    attempt.mutate();
  };
  const isUnknown = attempt.error instanceof ApiProblem && attempt.error.status === 401;
  const error = isUnknown ? t("The server does not know this key.") : attempt.error && sentence(attempt.error.message);
  return (
    <main className={classes.page}>
      <form className={`card ${classes.form}`} onSubmit={submit}>
        <Stack gap="md">
          <img src="/icon.svg" width={40} height={40} alt="" />
          <Title order={1}>share-compute</Title>
          {why !== undefined && (
            <Text size="sm">
              {why === "refused" ? t("This link was used already, has expired, or belongs to another server.") : t("Your session is over.")}
            </Text>
          )}
          <PasswordInput
            label={t("API key")}
            description={t(
              "share-compute sign-in on the server makes a link that signs you in without it. You stay signed in until the browser is closed.",
            )}
            value={key}
            onChange={(event) => setKey(event.currentTarget.value)}
            error={error}
            autoComplete="off"
            data-autofocus
            required
            withAsterisk={false}
          />
          <Button type="submit" loading={attempt.isPending}>
            {t("Sign in")}
          </Button>
        </Stack>
      </form>
    </main>
  );
}
