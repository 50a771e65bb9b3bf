/** Chinese, part by part; every part has its own file. */
const parts = import.meta.glob<Record<string, string>>("./*.json", { eager: true, import: "default" });

export default Object.assign({}, ...Object.values(parts)) as Record<string, string>;
