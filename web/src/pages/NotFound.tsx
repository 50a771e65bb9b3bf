import { Empty } from "../components/Feedback";
import { AnchorLink } from "../components/links";
import { Page } from "../components/Page";

export function NotFound() {
  return (
    <Page title="Not found">
      <Empty title="There is no page at this address">
        <AnchorLink to="/">
          Go to the pool
        </AnchorLink>
      </Empty>
    </Page>
  );
}
