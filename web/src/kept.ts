/** Small choices that the browser keeps. Without storage they hold until the page is closed. */

const unstored = new Map<string, string>();

export function kept(name: string): string | null {
  return unstored.get(name) ?? localStorage.getItem(name);
}

export function keep(name: string, text: string): void {
  try {
    localStorage.setItem(name, text);
    unstored.delete(name);
  } catch {
    unstored.set(name, text); // the storage is full or switched off
  }
}
