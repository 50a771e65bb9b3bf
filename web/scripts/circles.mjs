/** Refuses circles among the imports of src; imports of types and lazy imports count as well. */
import { readdirSync, readFileSync } from "node:fs";
import { dirname, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import typescript from "typescript";

const ROOT = fileURLToPath(new URL("../src", import.meta.url));
const ENDINGS = ["", ".ts", ".tsx", "/index.ts", "/index.tsx"];

const modules = readdirSync(ROOT, { recursive: true })
  .filter((name) => /\.tsx?$/.test(name))
  .map((name) => resolve(ROOT, name));

function imports(file) {
  const { importedFiles } = typescript.preProcessFile(readFileSync(file, "utf8"));
  return importedFiles
    .filter(({ fileName }) => fileName.startsWith("."))
    .map(({ fileName }) => ENDINGS.map((ending) => resolve(dirname(file), fileName + ending)).find((path) => modules.includes(path)))
    .filter((path) => path !== undefined);
}

const graph = new Map(modules.map((file) => [file, imports(file)]));
const finished = new Set();

/** Return the first circle that a depth-first search from `file` finds; `path` is the way to it. */
function circle(file, path = []) {
  if (path.includes(file)) return [...path.slice(path.indexOf(file)), file];
  if (finished.has(file)) return undefined;
  for (const next of graph.get(file)) {
    const found = circle(next, [...path, file]);
    if (found !== undefined) return found;
  }
  finished.add(file);
  return undefined;
}

for (const file of modules) {
  const found = circle(file);
  if (found === undefined) continue;
  console.error(`circle of imports: ${found.map((one) => relative(ROOT, one)).join(" -> ")}`);
  process.exit(1);
}
