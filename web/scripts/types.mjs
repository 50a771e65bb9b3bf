/** Writes openapi.json from the server's code, then the types of the client from it. Needs .venv (make setup). */
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";

const DUMP = `
import json, sys, tempfile
from pathlib import Path
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.app.app import create_app
with tempfile.TemporaryDirectory() as folder:
    settings = Settings(data_folder=Path(folder))
    app = create_app(settings, Store(settings.resolved_database_url), cluster=None)
    json.dump(app.openapi(), sys.stdout, indent=1, sort_keys=True)
`;

const document = execFileSync("../.venv/bin/python", ["-c", DUMP], { encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] });
writeFileSync("openapi.json", document + "\n");
execFileSync("npx", ["openapi-typescript", "openapi.json", "-o", "src/api/schema.d.ts"], { stdio: "inherit" });
