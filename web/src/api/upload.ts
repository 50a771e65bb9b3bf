/** Uploads files with XMLHttpRequest, since fetch does not report the progress. */
import { api, body } from "./client";
import { ApiProblem, unreachable } from "./problem";
import type { Upload, UploadKind } from "./types";

export interface Sent {
  /** Relative to the upload, with forward slashes. */
  path: string;
  file: File;
}

/**
 * Send files as one upload. The upload is created completely or not at all: a failed or aborted upload is deleted.
 * @param onProgress called with the number of bytes of all files that were sent.
 */
export async function upload(
  name: string,
  kind: UploadKind,
  files: readonly Sent[],
  onProgress: (sentBytes: number) => void,
  signal: AbortSignal,
): Promise<Upload> {
  await requireRoom(files);
  // This request is not aborted, because an upload with an unknown id cannot be deleted.
  const { id } = await body(api.POST("/api/v1/uploads", { body: { name, kind } }));
  try {
    let before = 0;
    for (const { path, file } of files) {
      await put(`/api/v1/uploads/${id}/files/${path.split("/").map(encodeURIComponent).join("/")}`, file, (sent) => onProgress(before + sent), signal);
      before += file.size;
      onProgress(before);
    }
    return await body(api.POST("/api/v1/uploads/{upload_id}/complete", { params: { path: { upload_id: id } }, signal }));
  } catch (failure) {
    // The server deletes the remaining uploads after a day.
    await api.DELETE("/api/v1/uploads/{upload_id}", { params: { path: { upload_id: id } } }).catch(() => undefined);
    throw failure;
  }
}

/**
 * Check the free space first, because a server that refuses a body closes the connection before its reason can be read.
 */
async function requireRoom(files: readonly Sent[]): Promise<void> {
  const wanted = files.reduce((sum, { file }) => sum + file.size, 0);
  const quota = await body(api.GET("/api/v1/uploads"));
  const left = Math.max(0, Math.min(quota.upload_limit_bytes, quota.limit_bytes - quota.used_bytes));
  if (wanted > left) {
    throw new ApiProblem(413, {
      detail: `${wanted} bytes are more than the ${left} that the server has room for`,
      hint: "remove uploads that nobody needs, below",
    });
  }
}

function put(url: string, file: File, onProgress: (sentBytes: number) => void, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal.aborted) return reject(signal.reason);
    const request = new XMLHttpRequest();
    const abort = () => request.abort();
    signal.addEventListener("abort", abort, { once: true });
    request.upload.onprogress = (event) => onProgress(Math.min(event.loaded, file.size));
    request.onloadend = () => signal.removeEventListener("abort", abort);
    request.onabort = () => reject(signal.reason);
    request.onerror = () => reject(unreachable());
    request.onload = () => {
      if (request.status >= 200 && request.status < 300) resolve();
      else reject(new ApiProblem(request.status, problemIn(request.responseText)));
    };
    request.open("PUT", url);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.send(file);
  });
}

function problemIn(text: string): object {
  try {
    return JSON.parse(text) as object;
  } catch {
    return {};
  }
}
