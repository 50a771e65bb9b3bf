/** The Chinese texts, merged from one file for each part. */
const parts = import.meta.glob<Record<string, string>>("./*.json", { eager: true, import: "default" });

export default Object.assign({}, ...Object.values(parts)) as Record<string, string>;
