import { Button, PasswordInput, Stack, Text, Title } from "@mantine/core";
import { useDocumentTitle } from "@mantine/hooks";
import { useMutation } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";

import { isKeyGood } from "../api/client";
import { signIn, signOutReason } from "../api/session";
import { sentence } from "../components/Feedback";
import classes from "./SignIn.module.css";

/** Shown in place of any page while the tab has no key; the address stays, so that the page comes after. */
export function SignIn() {
  useDocumentTitle("Sign in · share-compute");
  const [key, setKey] = useState("");
  const attempt = useMutation({
    mutationFn: async () => {
      if (!(await isKeyGood(key.trim()))) throw new Error("the server does not know this key");
      signIn(key.trim());
    },
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    attempt.mutate();
  };
  return (
    <main className={classes.page}>
      <form className={`card ${classes.form}`} onSubmit={submit}>
        <Stack gap="md">
          <img src="/icon.svg" width={40} height={40} alt="" />
          <Title order={1}>share-compute</Title>
          {signOutReason() !== undefined && <Text size="sm">{signOutReason()}</Text>}
          <PasswordInput
            label="API key"
            description="share-compute up prints it, with a link that signs you in. The key is forgotten when this tab closes."
            value={key}
            onChange={(event) => setKey(event.currentTarget.value)}
            error={attempt.error !== null && sentence(attempt.error.message)}
            autoComplete="off"
            data-autofocus
            required
            withAsterisk={false}
          />
          <Button type="submit" loading={attempt.isPending}>
            Sign in
          </Button>
        </Stack>
      </form>
    </main>
  );
}
