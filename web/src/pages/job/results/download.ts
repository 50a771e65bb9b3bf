/** Downloads of artifact files by the browser itself, which sends the session's cookie. */

function fileAddress(jobId: string, artifactName: string, path: string): string {
  const address = ["/api/v1/jobs", encodeURIComponent(jobId), "artifacts", encodeURIComponent(artifactName), "files"];
  return `${address.join("/")}/${path.split("/").map(encodeURIComponent).join("/")}`;
}

/** Download one file of an artifact with the browser, which streams it to disk, shows progress and can resume. */
export function download(jobId: string, artifactName: string, path: string): void {
  const link = document.createElement("a");
  link.href = fileAddress(jobId, artifactName, path);
  link.download = path.split("/").at(-1) ?? path;
  link.click();
}
