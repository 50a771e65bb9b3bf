/** Downloads need the Authorization header, which a plain link cannot send. */
import { authorizedFetch } from "../../api/client";

interface FilePicker {
  showSaveFilePicker?: (options: { suggestedName: string }) => Promise<FileSystemFileHandle>;
}

/** Save one file of an artifact: straight to disk where the browser can, through memory elsewhere. */
export async function download(jobId: string, artifactName: string, path: string): Promise<void> {
  const address = ["/api/v1/jobs", encodeURIComponent(jobId), "artifacts", encodeURIComponent(artifactName), "files"];
  const url = `${address.join("/")}/${path.split("/").map(encodeURIComponent).join("/")}`;
  const suggestedName = path.split("/").at(-1) ?? path;
  const pick = (window as FilePicker).showSaveFilePicker;
  if (pick === undefined) {
    const response = await authorizedFetch(new Request(url));
    saveBlob(await response.blob(), suggestedName);
    return;
  }
  let handle: FileSystemFileHandle;
  try {
    handle = await pick.call(window, { suggestedName });
  } catch (failure) {
    // Closing the dialog is an answer, not an error.
    if (failure instanceof DOMException && failure.name === "AbortError") return;
    throw failure;
  }
  const response = await authorizedFetch(new Request(url));
  // The file appears under its name only when the stream ends well.
  await response.body?.pipeTo(await handle.createWritable());
}

function saveBlob(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
