/** Models: the deployments, and the catalogue of models that can be deployed. */
import { getRouteApi } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { useMay } from "../api/scopes";
import { ButtonLink } from "../components/links";
import { Page } from "../components/frame/Page";
import { DeployForm } from "./deployment/DeployForm";
import { Catalogue } from "./models/Catalogue";
import { Running } from "./models/Running";

const route = getRouteApi("/models");

export function Models() {
  const { t } = useTranslation();
  const search = route.useSearch();
  const canDeploy = useMay("submit");
  const mayChat = useMay("chat");
  const { job, artifact, path } = search;
  return (
    <Page
      title={t("Models")}
      actions={
        <>
          {mayChat && (
            <ButtonLink to="/playground" variant="default">
              {t("Playground")}
            </ButtonLink>
          )}
          {canDeploy && search.new !== true && (
            <ButtonLink to="/models" search={{ ...search, new: true }} variant="default">
              {t("Deploy a model")}
            </ButtonLink>
          )}
        </>
      }
    >
      {canDeploy && search.new === true && (
        <DeployForm
          // The form of another model starts anew.
          key={`${job} ${artifact} ${path}`}
          {...(job !== undefined && { job })}
          {...(artifact !== undefined && { artifact })}
          {...(path !== undefined && { path })}
        />
      )}
      <Running />
      {canDeploy && <Catalogue />}
    </Page>
  );
}
