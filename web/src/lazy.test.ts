import { expect, test, vi } from "vitest";

import { withRetries } from "./lazy";

test("code is requested again after a failure", async () => {
  const load = vi.fn<() => Promise<string>>().mockRejectedValueOnce(new Error("ERR_NETWORK_CHANGED")).mockResolvedValue("page");
  expect(await withRetries(load, [0, 0])).toBe("page");
  expect(load).toHaveBeenCalledTimes(2);
});

test("the last failure is thrown", async () => {
  let attempt = 0;
  const load = () => Promise.reject(new Error(`attempt ${(attempt += 1)}`));
  vi.spyOn(console, "error").mockImplementation(() => undefined);
  await expect(withRetries(load, [0, 0])).rejects.toThrow("attempt 3");
});
