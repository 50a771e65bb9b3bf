/** Names of figures, metrics and results in the current language. */
import { t } from "../../format";
import { FIGURES, taskOf, type FigureName } from "./search";

/** Keys of `t`. */
const NAME_OF_FIGURE: Record<(typeof FIGURES)[number], string> = {
  loss: "Loss",
  learning_rate: "Learning rate",
  tokens_per_s: "Speed",
  seconds: "Step time",
  gradient_norm: "Gradient norm",
  accuracy: "Accuracy",
  top_5_accuracy: "Top-5 accuracy",
  f1: "F1",
  auroc: "AUROC",
  rmse: "RMSE",
  mae: "Mean absolute error",
  r2: "R²",
  perplexity: "Perplexity",
};
const SPLITS = ["validation", "test"] as const;

/** The name of a figure, preceded by the name of its task. */
export function nameOfFigure(figure: FigureName): string {
  const { figure: name, task } = taskOf(figure);
  return task === undefined ? t(NAME_OF_FIGURE[name]) : t("{{task}}: {{figure}}", { task, figure: t(NAME_OF_FIGURE[name]) });
}

/** The name of a job's result, or of a sweep's metric: `loss`, `validation_loss`, `test_digit.accuracy`. */
export function nameOfResult(result: string): string {
  const split = SPLITS.find((one) => result.startsWith(`${one}_`));
  const figure = split === undefined ? result : result.slice(split.length + 1);
  const name = FIGURES.some((one) => one === taskOf(figure as FigureName).figure) ? nameOfFigure(figure as FigureName) : figure.replaceAll("_", " ");
  return split === undefined ? name : t("{{figure}} ({{split}})", { figure: name, split: t(split) });
}
