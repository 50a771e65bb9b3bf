/** Picked or dropped files, with their names in the upload. */
import type { UploadKind } from "../../../api/types";
import type { Sent } from "../../../api/upload";

/** Files from a file picker; files of a folder have their paths inside it. */
export function picked(files: FileList | null): Sent[] {
  return [...(files ?? [])].map((file) => ({ file, path: file.webkitRelativePath || file.name }));
}

/** Dropped files, and all files in dropped folders. */
export async function dropped(transfer: DataTransfer): Promise<Sent[]> {
  // Read all entries before the first await, after which the browser empties the transfer.
  const items = [...transfer.items].map((item) => ({ entry: item.webkitGetAsEntry(), file: item.getAsFile() }));
  const found = items.map(({ entry, file }) => {
    if (entry !== null) return below(entry);
    return file === null ? [] : [{ file, path: file.name }];
  });
  return (await Promise.all(found)).flat();
}

async function below(entry: FileSystemEntry): Promise<Sent[]> {
  const path = entry.fullPath.replace(/^\//, "");
  if (entry.isFile) {
    const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
    return [{ file, path }];
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  const found: Sent[] = [];
  for (;;) {
    // A call returns at most a hundred entries, and none at the end.
    const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) return found;
    for (const one of some) found.push(...(await below(one)));
  }
}

/** Pickle files, which may run code when they are loaded. */
const PICKLE = /\.(bin|ckpt|dill|joblib|pickle|pkl|pt|pth)$/i;

/**
 * Return the files to send, without their common folder and without hidden ones, and the names of pickles that are left
 * out. A model with only pickled weights is sent unchanged; the server's error then explains how to convert it.
 */
export function usable(all: readonly Sent[], kind: UploadKind): { files: Sent[]; leftOut: string[] } {
  const seen = all.filter(({ path }) => !path.split("/").some((part) => part.startsWith(".")));
  const hasSafe = seen.some(({ path }) => path.endsWith(".safetensors"));
  const isLeftOut = ({ path }: Sent) => (kind === "model" ? hasSafe : kind === "tokenizer") && PICKLE.test(path);
  const kept = seen.filter((one) => !isLeftOut(one));
  const top = kept[0]?.path.split("/")[0];
  const hasTop = kept.length > 0 && kept.every(({ path }) => path.startsWith(`${top}/`));
  return {
    files: kept.map(({ file, path }) => ({ file, path: hasTop ? path.slice(top!.length + 1) : path })),
    leftOut: seen.filter(isLeftOut).map(({ path }) => path),
  };
}

/** A name for several files: the name of their folder, or of the first file. */
export function nameOf(files: readonly Sent[]): string {
  const first = files[0];
  if (first === undefined) return "";
  const folder = first.file.webkitRelativePath.split("/")[0];
  const name = folder !== undefined && folder !== "" ? folder : first.file.name;
  return files.length === 1 || folder ? name : `${name} + ${files.length - 1}`;
}
