/** The frame around every page: navigation, the state of the live connection, sign-out. */
import { ActionIcon, AppShell, Burger, Container, Group, Kbd, Text, UnstyledButton, VisuallyHidden, useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { Link, Outlet, useLocation } from "@tanstack/react-router";
import { Suspense, useEffect, useState } from "react";
import { useTranslation } from "react-i18next";

import { groupAlerts } from "../../alerts/groups";
import { useAlerts } from "../../alerts/useAlerts";
import { useLiveRefresh } from "../../api/events/useLiveRefresh";
import { may, type Scope } from "../../api/scopes";
import { signOut, useSession, type SignedInKey } from "../../api/session";
import { choose, LANGUAGES, type Language } from "../../i18n";
import { useJobNotifications } from "../../notifications/useJobNotifications";
import { SignIn } from "../../pages/SignIn";
import { Empty, Failure } from "../Feedback";
import { AnchorLink, ButtonLink } from "../links";
import { chooseDensity, useDensity } from "../../density";
import { lazyPart } from "../../lazy";
import { LiveMark } from "./LiveMark";
import { isAt, PLACES, scopeOf } from "./places";
import classes from "./Shell.module.css";

const Palette = lazyPart(async () => (await import("../../palette/Palette")).Palette);

export function Shell() {
  const session = useSession();
  switch (session.state) {
    case "asking":
      return null;
    case "out":
      return <SignIn why={session.why} />;
    case "failed":
      return (
        <Container component="main" py="xl">
          <Failure error={session.error} retry={session.retry} />
        </Container>
      );
    case "in":
      return <Frame signedIn={session.key} />;
  }
}

function Frame({ signedIn }: { signedIn: SignedInKey }) {
  const live = useLiveRefresh(may(signedIn, "read"));
  const path = useLocation({ select: ({ pathname }) => pathname });
  const needed = scopeOf(path);
  const [isOpen, menu] = useDisclosure(false);
  const palette = usePalette();
  const { t } = useTranslation();
  useJobNotifications();
  return (
    <AppShell header={{ height: 56 }} padding="md">
      <a className="skip" href="#content" onClick={focusContent}>
        {t("Skip to content")}
      </a>
      <AppShell.Header className={classes.header}>
        <Group h="100%" px="md" gap="md" wrap="nowrap" maw={1280} mx="auto">
          <Burger hiddenFrom="md" size="sm" opened={isOpen} onClick={menu.toggle} aria-label={t("Navigation")} aria-expanded={isOpen} />
          <Link to="/" className={classes.brand}>
            <img src="/icon.svg" width={24} height={24} alt="" />
            <Text component="span" fw={600}>
              share-compute
            </Text>
          </Link>
          <nav className={classes.nav} data-open={isOpen} aria-label={t("Pages")}>
            {PLACES.filter(({ isFor }) => isFor(signedIn)).map(({ to, label, paths }) => (
              <Link
                key={to}
                to={to}
                className={classes.link}
                activeOptions={{ exact: true }}
                aria-current={isAt(path, paths) ? "true" : undefined}
                onClick={menu.close}
              >
                {t(label)}
                {to === "/admin" && <AlertCount />}
              </Link>
            ))}
            {may(signedIn, "admin") && (
              <Link to="/invites" className={`${classes.link} ${classes.phone}`} onClick={menu.close}>
                {t("Invite")}
              </Link>
            )}
            <LanguageSwitch hiddenFrom="md" />
            <SchemeSwitch hiddenFrom="md" />
            <DensitySwitch hiddenFrom="md" />
            <SignOut hiddenFrom="md" />
          </nav>
          <Group gap="xs" wrap="nowrap" ml="auto">
            {live !== null && <LiveMark live={live} />}
            <UnstyledButton className={classes.search} c="dimmed" onClick={palette.open} aria-keyshortcuts="Control+K Meta+K">
              <SearchIcon />
              <VisuallyHidden>{t("Search and commands")}</VisuallyHidden>
              <Kbd size="xs" visibleFrom="lg">
                {IS_MAC ? "⌘K" : "Ctrl K"}
              </Kbd>
            </UnstyledButton>
            <LanguageSwitch visibleFrom="md" />
            <SchemeSwitch visibleFrom="md" />
            <DensitySwitch visibleFrom="md" />
            <SignOut visibleFrom="md" />
            {may(signedIn, "admin") && (
              <ButtonLink to="/invites" variant="default" size="xs" visibleFrom="xs">
                {t("Invite")}
              </ButtonLink>
            )}
            {may(signedIn, "submit") && (
              <ButtonLink to="/submit" size="xs">
                {t("Submit")}
              </ButtonLink>
            )}
          </Group>
        </Group>
      </AppShell.Header>
      <AppShell.Main id="content" tabIndex={-1} className={classes.main}>
        <div className={classes.content}>
          {may(signedIn, needed) ? <Outlet /> : <NotAllowed signedIn={signedIn} needed={needed} />}
        </div>
      </AppShell.Main>
      {palette.wasOpen && (
        <Suspense fallback={null}>
          <Palette isOpen={palette.isOpen} onClose={palette.close} signedIn={signedIn} />
        </Suspense>
      )}
    </AppShell>
  );
}

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.userAgent);

/** The command palette, opened by Ctrl-K or Cmd-K; its code is loaded when it is first opened. */
function usePalette() {
  const [isOpen, { open, close, toggle }] = useDisclosure(false);
  const [wasOpen, setWasOpen] = useState(false);
  if (isOpen && !wasOpen) setWasOpen(true);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
      event.preventDefault();
      toggle();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [toggle]);
  return { isOpen, wasOpen, open, close };
}

/** Number of alerts that nobody acknowledged in this browser; several machines in the same condition count as one. */
function AlertCount() {
  const { t } = useTranslation();
  const { fresh } = useAlerts(true);
  if (fresh.length === 0) return null;
  const number = groupAlerts(fresh).length;
  const isError = fresh.some((alert) => alert.severity === "error");
  return (
    <>
      <span className={classes.count} data-severity={isError ? "error" : "warning"} aria-hidden>
        {number}
      </span>
      <VisuallyHidden>{t("{{count}} alerts", { count: number })}</VisuallyHidden>
    </>
  );
}

function SearchIcon() {
  return (
    <svg viewBox="0 0 20 20" width={16} height={16} aria-hidden fill="none" stroke="currentColor" strokeWidth="2" strokeLinecap="round">
      <circle cx="8.5" cy="8.5" r="5.5" />
      <path d="M13 13l4 4" />
    </svg>
  );
}

/** Shown instead of a page if the key lacks the page's scope. */
function NotAllowed({ signedIn, needed }: { signedIn: SignedInKey; needed: Scope }) {
  const { t } = useTranslation();
  return (
    <Empty title={t("This key may not see this page")}>
      <Text>
        {t("The page needs the scope {{needed}}; the key {{name}} has {{has}}. An operator can make one with it: share-compute keys create NAME --scope {{needed}}", {
          needed,
          name: signedIn.name,
          has: signedIn.scopes.join(", "),
        })}
      </Text>
      {may(signedIn, "chat") && <AnchorLink to="/playground">{t("Talk to the models that are served")}</AnchorLink>}
    </Empty>
  );
}

function focusContent(event: React.MouseEvent) {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

/** Shown beside the navigation on wide screens, and in its menu on narrow ones. */
interface Where {
  visibleFrom?: "md";
  hiddenFrom?: "md";
}

function SignOut(props: Where) {
  const { t } = useTranslation();
  return (
    <UnstyledButton className={classes.link} fz="sm" c="dimmed" onClick={() => void signOut()} {...props}>
      {t("Sign out")}
    </UnstyledButton>
  );
}

/** Shows the name of the other language, in that language. */
function LanguageSwitch(props: Where) {
  const { i18n } = useTranslation();
  const next: Language = i18n.language === "zh" ? "en" : "zh";
  return (
    <UnstyledButton
      className={classes.link}
      fz="sm"
      c="dimmed"
      lang={next === "zh" ? "zh-Hans" : "en"}
      onClick={() => void choose(next)}
      {...props}
    >
      {LANGUAGES[next]}
    </UnstyledButton>
  );
}

function SchemeSwitch(props: Where) {
  const { t } = useTranslation();
  const { setColorScheme } = useMantineColorScheme();
  const next = useComputedColorScheme("light") === "light" ? "dark" : "light";
  return (
    <ActionIcon
      variant="subtle"
      color="gray"
      className={classes.quiet}
      aria-label={next === "dark" ? t("Use the dark colours") : t("Use the light colours")}
      onClick={() => setColorScheme(next)}
      {...props}
    >
      <svg viewBox="0 0 20 20" width={18} height={18} aria-hidden fill="currentColor">
        <path d="M10 3a7 7 0 0 1 0 14z" />
        <circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" strokeWidth="2" />
      </svg>
    </ActionIcon>
  );
}

/** Button for the density of rows; its icon shows the present density. */
function DensitySwitch(props: Where) {
  const { t } = useTranslation();
  const isCompact = useDensity() === "compact";
  return (
    <ActionIcon
      variant="subtle"
      color="gray"
      className={classes.quiet}
      aria-label={t("Compact tables and cards")}
      aria-pressed={isCompact}
      onClick={() => chooseDensity(isCompact ? "comfortable" : "compact")}
      {...props}
    >
      <svg viewBox="0 0 20 20" width={18} height={18} aria-hidden fill="none" stroke="currentColor" strokeWidth="2" strokeLinecap="round">
        {(isCompact ? [5, 8.4, 11.8, 15.2] : [4, 10, 16]).map((y) => (
          <path key={y} d={`M4 ${y}h12`} />
        ))}
      </svg>
    </ActionIcon>
  );
}
