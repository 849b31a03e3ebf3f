// A page that was opened from a file may start no worker, and search is one. There, this class runs the worker's script in a
// hidden frame of the page. The theme's plugin `offline` looks for the name.
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    const inside = frame.contentWindow;
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = inside.document.createElement("script");
    script.src = new URL(url, document.baseURI).href;
    this.ready = new Promise((resolve) => { script.onload = () => resolve(inside); });
    inside.document.body.appendChild(script);
  }
  postMessage(data) {
    this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
