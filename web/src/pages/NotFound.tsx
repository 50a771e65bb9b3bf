import { useTranslation } from "react-i18next";

import { Empty } from "../components/Feedback";
import { Page } from "../components/frame/Page";
import { AnchorLink } from "../components/links";

export function NotFound() {
  const { t } = useTranslation();
  return (
    <Page title={t("Not found")}>
      <Empty title={t("There is no page at this address")}>
        <AnchorLink to="/">{t("Go to the machines")}</AnchorLink>
      </Empty>
    </Page>
  );
}
