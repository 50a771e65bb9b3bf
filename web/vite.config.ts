import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { brotliCompressSync, gzipSync } from "node:zlib";

import react from "@vitejs/plugin-react";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

import { startsOf } from "./src/i18n/starts";

/** Where `npm run dev` finds the control plane. */
const server = process.env.SHARE_COMPUTE_URL ?? "http://127.0.0.1:8700";

/** Writes compressed copies beside scripts and styles; the server selects one by Accept-Encoding (dashboard.py). */
const compressed: Plugin = {
  name: "compressed-copies",
  apply: "build",
  writeBundle({ dir }, bundle) {
    for (const name of Object.keys(bundle).filter((name) => /\.(js|css)$/.test(name))) {
      const path = join(dir!, name);
      const content = readFileSync(path);
      writeFileSync(`${path}.br`, brotliCompressSync(content));
      writeFileSync(`${path}.gz`, gzipSync(content, { level: 9 }));
    }
  },
};

/** The module `virtual:starts`: first words of the texts of the server and of the dashboard. */
const starts: Plugin = {
  name: "starts",
  resolveId: (id) => (id === "virtual:starts" ? `\0${id}` : undefined),
  load(id) {
    if (id !== "\0virtual:starts") return undefined;
    const folder = join(__dirname, "src/i18n/zh");
    const own = readdirSync(folder).filter((name) => name.endsWith(".json"));
    const files = [...own.map((name) => join(folder, name)), join(__dirname, "../platform/share_compute/translations/zh.json")];
    const texts = files.flatMap((file) => Object.keys(JSON.parse(readFileSync(file, "utf-8")) as object));
    return `export default ${JSON.stringify(startsOf(texts))}`;
  },
};

export default defineConfig({
  plugins: [react(), compressed, starts],
  // The server puts a fresh nonce here in each answer (dashboard.py).
  html: { cspNonce: "__CSP_NONCE__" },
  build: {
    outDir: "../api/share_compute_api/static",
    emptyOutDir: true,
    // Inlined data: URLs would have to be allowed by the Content-Security-Policy.
    assetsInlineLimit: 0,
    // One file: Vite never requests the styles of a page again, once their loading failed.
    cssCodeSplit: false,
    chunkSizeWarningLimit: 700,
    // Modules that several pages share are one chunk: dozens of small ones would be loaded one after the other.
    // The map, which most users open first, has no curves.
    rolldownOptions: {
      output: {
        codeSplitting: {
          groups: [
            { name: "uplot", test: /node_modules.uplot/, priority: 1 },
            { name: "shared", minShareCount: 4 },
          ],
        },
      },
    },
  },
  // The catalogue of Chinese texts is in the Python package.
  server: { proxy: { "/api": server }, fs: { allow: [".."] } },
  test: { include: ["src/**/*.test.ts"] },
});
