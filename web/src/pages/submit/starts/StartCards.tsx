/** The examples to start a job from, as cards. */
import { Link } from "@tanstack/react-router";
import type { TFunction } from "i18next";
import { useTranslation } from "react-i18next";

import classes from "./StartCards.module.css";
import { STARTS, type Start } from "./starts";

interface Card {
  title: string;
  size: string;
  /** Path of its picture, in a square of 24 units. */
  picture: string;
}

function cards(t: TFunction): Record<Start, Card> {
  return {
    digits: {
      title: t("Train a digit classifier"),
      size: t("17,000 parameters, data included"),
      picture: "M4 4h6v16H4zM14 4h6v7h-6zM14 11h6v9h-6z",
    },
    language: {
      title: t("Train a language model"),
      size: t("3 to 77 million parameters, your text"),
      picture: "M4 5h16M4 10h11M4 15h16M4 20h7",
    },
    generate: {
      title: t("Let a model answer rows"),
      size: t("your file, a model that is served"),
      picture: "M4 5h10v6H4zM10 14h10v6H10zM17 5v5M14.5 8L17 10.5 19.5 8",
    },
    embed: {
      title: t("Turn rows into vectors"),
      size: t("your file, an encoder"),
      picture: "M5 19V5M5 19h14M5 19L17 7M13 7h4v4",
    },
    sweep: {
      title: t("Search for the best settings"),
      size: t("a sweep of 8 small jobs, data included"),
      picture: "M4 7h16M4 12h16M4 17h16M8 5v4M16 10v4M11 15v4",
    },
    serve: {
      title: t("Serve a model"),
      size: t("a model of yours"),
      picture: "M4 5h16v11H10l-4 4v-4H4zM8 9h8M8 12h5",
    },
  };
}

interface Props {
  /** Absent if the start is an earlier job. */
  chosen: Start | undefined;
  /** Names of the examples whose text the user has changed. */
  changed: ReadonlySet<string>;
}

export function StartCards({ chosen, changed }: Props) {
  const { t } = useTranslation();
  const all = cards(t);
  return (
    <nav aria-label={t("Start from")} className={classes.cards}>
      {(Object.keys(STARTS) as Start[]).map((name) => {
        const { title, size, picture } = all[name];
        return (
          <Link
            key={name}
            to="/submit"
            search={(old) => ({ ...(old.view === "yaml" && { view: "yaml" as const }), ...(name !== "digits" && { start: name }) })}
            replace
            activeOptions={{ exact: true, includeSearch: true }}
            aria-current={name === chosen ? "true" : undefined}
            data-chosen={name === chosen}
            className={classes.card}
          >
            <svg viewBox="0 0 24 24" width={22} height={22} aria-hidden className={classes.picture}>
              <path d={picture} />
            </svg>
            <span className={classes.title}>{title}</span>
            <span className={classes.facts}>{changed.has(name) ? t("{{size}} · changed", { size }) : size}</span>
          </Link>
        );
      })}
    </nav>
  );
}
