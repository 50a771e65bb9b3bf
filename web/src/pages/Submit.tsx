/** A job as YAML: from an example to the server, with what is wrong marked at its line. */
import { Button, Group, SegmentedControl, Stack, Text } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { useMutation } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useMemo, useState } from "react";

import { ApiProblem } from "../api/problem";
import { submitYaml } from "../api/submit";
import { Failure } from "../components/Feedback";
import { Page } from "../components/Page";
import digits from "./submit/digits.yaml?raw";
import { Editor } from "./submit/Editor";
import language from "./submit/language.yaml?raw";
import { locate, syntaxProblems } from "./submit/locate";

const EXAMPLES = { digits, language } as const;
type Example = keyof typeof EXAMPLES;

const TYPING_MS = 400;

export function Submit() {
  const navigate = useNavigate();
  const [example, setExample] = useState<Example>("digits");
  const [text, setText] = useState<string>(EXAMPLES.digits);
  const [settled] = useDebouncedValue(text, TYPING_MS);
  const syntax = useMemo(() => syntaxProblems(settled), [settled]);

  // One key for one text: a second click, or a retry after a lost answer, does not make a second job.
  const idempotencyKey = useMemo(() => randomKey(), [text]);
  const sending = useMutation({
    mutationFn: () => submitYaml(text, idempotencyKey),
    onSuccess: (job) => navigate({ to: "/jobs/$jobId", params: { jobId: job.id } }),
  });
  const refused = sending.error instanceof ApiProblem ? locate(text, sending.error.fields) : [];

  const edit = (next: string) => {
    setText(next);
    sending.reset();
  };
  const choose = (next: Example) => {
    setExample(next);
    edit(EXAMPLES[next]);
  };
  const isOwn = text !== EXAMPLES[example];

  return (
    <Page title="Submit a job">
      <Stack gap="md">
        <Group gap="sm" justify="space-between">
          <SegmentedControl
            aria-label="Start from an example"
            value={example}
            onChange={(value) => choose(value as Example)}
            disabled={isOwn}
            data={[
              { value: "digits", label: "Digit classifier" },
              { value: "language", label: "Language model" },
            ]}
          />
          {isOwn && (
            <Button variant="subtle" onClick={() => choose(example)}>
              Back to the example
            </Button>
          )}
        </Group>
        <Editor label="Job as YAML" text={text} onChange={edit} problems={syntax.length > 0 ? syntax : refused} />
        {sending.error !== null && refused.length === 0 && <Failure error={sending.error} />}
        <Group justify="space-between">
          <Text size="sm" c="dimmed">
            The same file works with <code>share-compute submit job.yaml</code>.
          </Text>
          <Button onClick={() => sending.mutate()} loading={sending.isPending} disabled={syntax.length > 0}>
            Submit
          </Button>
        </Group>
      </Stack>
    </Page>
  );
}

/** 128 random bits; `crypto.randomUUID` is missing where the page comes over plain HTTP from another machine. */
function randomKey(): string {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16).padStart(8, "0")).join("");
}
