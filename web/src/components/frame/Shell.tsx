/** The frame around every page: navigation, the state of the live connection, sign-out. */
import { ActionIcon, AppShell, Burger, Container, Group, Text, UnstyledButton, useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { Link, Outlet, useLocation } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { useLiveRefresh } from "../../api/events/useLiveRefresh";
import { may, type Scope } from "../../api/scopes";
import { signOut, useSession, type SignedInKey } from "../../api/session";
import { choose, LANGUAGES, type Language } from "../../i18n";
import { SignIn } from "../../pages/SignIn";
import { Empty, Failure } from "../Feedback";
import { AnchorLink } from "../links";
import { LiveMark } from "./LiveMark";
import classes from "./Shell.module.css";

const PLACES = [
  { to: "/", label: "Machines", scope: "read" },
  { to: "/jobs", label: "Jobs", scope: "read" },
  { to: "/models", label: "Models", scope: "read" },
  { to: "/playground", label: "Playground", scope: "chat" },
  { to: "/submit", label: "Submit", scope: "submit" },
  { to: "/invites", label: "Invite", scope: "admin" },
  { to: "/operations", label: "Operations", scope: "read" },
] as const;

/** The scope that the page at an address needs; pages of single objects need that of their list. */
function scopeOf(path: string): Scope {
  const place = PLACES.find(({ to }) => to !== "/" && path.startsWith(to));
  return place?.scope ?? "read";
}

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
  const needed = scopeOf(useLocation({ select: ({ pathname }) => pathname }));
  const [isOpen, menu] = useDisclosure(false);
  const { t } = useTranslation();
  return (
    <AppShell header={{ height: 56 }} padding="md">
      <a className="skip" href="#content" onClick={focusContent}>
        {t("Skip to content")}
      </a>
      <AppShell.Header className={classes.header}>
        <Group h="100%" px="md" gap="md" wrap="nowrap" maw={1280} mx="auto">
          <Burger hiddenFrom="sm" size="sm" opened={isOpen} onClick={menu.toggle} aria-label={t("Navigation")} aria-expanded={isOpen} />
          <Link to="/" className={classes.brand}>
            <img src="/icon.svg" width={24} height={24} alt="" />
            <Text component="span" fw={600}>
              share-compute
            </Text>
          </Link>
          <nav className={classes.nav} data-open={isOpen} aria-label={t("Pages")}>
            {PLACES.filter(({ scope }) => may(signedIn, scope)).map(({ to, label }) => (
              <Link
                key={to}
                to={to}
                className={classes.link}
                activeOptions={{ exact: to === "/" }}
                onClick={menu.close}
              >
                {t(label)}
              </Link>
            ))}
            <SignOut hiddenFrom="sm" />
          </nav>
          <Group gap="sm" wrap="nowrap" ml="auto">
            {live !== null && <LiveMark live={live} />}
            <LanguageSwitch />
            <SchemeSwitch />
            <SignOut visibleFrom="sm" />
          </Group>
        </Group>
      </AppShell.Header>
      <AppShell.Main id="content" tabIndex={-1} className={classes.main}>
        <div className={classes.content}>
          {may(signedIn, needed) ? <Outlet /> : <NotAllowed signedIn={signedIn} needed={needed} />}
        </div>
      </AppShell.Main>
    </AppShell>
  );
}

/** Shown in place of a page for which the key lacks the scope. */
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

function SignOut(props: { visibleFrom?: "sm"; hiddenFrom?: "sm" }) {
  const { t } = useTranslation();
  return (
    <UnstyledButton className={classes.link} onClick={() => void signOut()} {...props}>
      {t("Sign out")}
    </UnstyledButton>
  );
}

/** Shows the name of the other language, in that language. */
function LanguageSwitch() {
  const { i18n } = useTranslation();
  const next: Language = i18n.language === "zh" ? "en" : "zh";
  return (
    <UnstyledButton className={classes.link} lang={next === "zh" ? "zh-Hans" : "en"} onClick={() => void choose(next)}>
      {LANGUAGES[next]}
    </UnstyledButton>
  );
}

function SchemeSwitch() {
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
    >
      <svg viewBox="0 0 20 20" width={18} height={18} aria-hidden fill="currentColor">
        <path d="M10 3a7 7 0 0 1 0 14z" />
        <circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" strokeWidth="2" />
      </svg>
    </ActionIcon>
  );
}
