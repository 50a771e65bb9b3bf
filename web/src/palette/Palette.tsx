/** The command palette: a text field that finds pages, actions, jobs, machines and deployments. */
import { Modal, Text } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { useEffect, useId, useState, type KeyboardEvent } from "react";
import { useTranslation } from "react-i18next";

import type { SignedInKey } from "../api/session";
import classes from "./Palette.module.css";
import { useEntries, type Entry } from "./useEntries";

interface Props {
  isOpen: boolean;
  onClose: () => void;
  signedIn: SignedInKey;
}

const TYPING_MS = 150;

export function Palette({ isOpen, onClose, signedIn }: Props) {
  const { t } = useTranslation();
  return (
    <Modal.Root opened={isOpen} onClose={onClose} size="lg" yOffset="12vh" transitionProps={{ duration: 0 }}>
      <Modal.Overlay />
      <Modal.Content aria-label={t("Search and commands")}>
        <Finder onClose={onClose} signedIn={signedIn} />
      </Modal.Content>
    </Modal.Root>
  );
}

/** A combobox with its listbox (WAI-ARIA APG, "editable combobox with list autocomplete"). */
function Finder({ onClose, signedIn }: Omit<Props, "isOpen">) {
  const { t } = useTranslation();
  const id = useId();
  const [text, setText] = useState("");
  const [searched] = useDebouncedValue(text, TYPING_MS);
  const [chosen, setChosen] = useState(0);
  const groups = useEntries(signedIn, text, searched);
  const all = groups.flatMap(({ entries }) => entries);
  const place = Math.min(chosen, all.length - 1);
  const name = (entry: Entry) => `${id}-${entry.id}`;

  useEffect(() => {
    if (place >= 0) document.getElementById(name(all[place]!))?.scrollIntoView({ block: "nearest" });
  }, [place, text]);

  const run = (entry: Entry | undefined) => {
    if (entry === undefined) return;
    onClose();
    void entry.run();
  };
  const onKey = (event: KeyboardEvent) => {
    // Keys that choose a word of an input method must not choose an entry.
    if (event.nativeEvent.isComposing) return;
    const moves: Partial<Record<string, number>> = { ArrowDown: place + 1, ArrowUp: place - 1 + all.length };
    const to = moves[event.key];
    if (to !== undefined && all.length > 0) setChosen(to % all.length);
    else if (event.key === "Enter") run(all[place]);
    else return;
    event.preventDefault();
  };
  return (
    <>
      <input
        className={classes.input}
        // Focus at once, so that no key is lost; the dialog itself moves the focus later.
        autoFocus
        data-autofocus
        role="combobox"
        aria-label={t("Search and commands")}
        aria-expanded={all.length > 0}
        aria-controls={`${id}-list`}
        aria-autocomplete="list"
        aria-activedescendant={place >= 0 ? name(all[place]!) : undefined}
        placeholder={t("Page, action, job, machine or model")}
        autoComplete="off"
        spellCheck={false}
        value={text}
        onChange={(event) => {
          setText(event.currentTarget.value);
          setChosen(0);
        }}
        onKeyDown={onKey}
      />
      <div role="listbox" id={`${id}-list`} aria-label={t("Results")} className={classes.list} hidden={all.length === 0}>
        {groups.map((group) => (
          <div key={group.id} role="group" aria-labelledby={`${id}-of-${group.id}`}>
            <div id={`${id}-of-${group.id}`} className={classes.group} role="presentation">
              {group.title}
            </div>
            {group.entries.map((entry) => (
              <div
                key={entry.id}
                id={name(entry)}
                role="option"
                aria-selected={entry === all[place]}
                className={classes.option}
                onPointerMove={() => setChosen(all.indexOf(entry))}
                onClick={() => run(entry)}
              >
                <span className={classes.label}>{entry.label}</span>
                {entry.detail !== undefined && <span className={classes.detail}>{entry.detail}</span>}
              </div>
            ))}
          </div>
        ))}
      </div>
      <div role="status">
        {all.length === 0 && (
          <Text size="sm" c="dimmed" className={classes.none!}>
            {t("No match.")}
          </Text>
        )}
      </div>
    </>
  );
}
