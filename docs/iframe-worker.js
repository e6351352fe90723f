/* The search runs in a worker. Browsers refuse workers to pages that are opened as files, without a server.
   There, this class does the same in an iframe: it loads the worker's script and carries messages. */
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.ready = false;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== this.inner) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.inner.postMessage = this.inner.postMessage.bind(this.inner);
      this.toInner = this.inner.postMessage;
      /* In the iframe, as in a worker, postMessage goes to the page, and importScripts loads in order. */
      this.inner.eval(`
        postMessage = (message) => parent.postMessage(message, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          script.onerror = failed;
          document.body.append(script);
        })), Promise.resolve());
      `);
      this.inner.importScripts(url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((message) => this.postMessage(message));
      });
    }

    postMessage(message) {
      if (this.ready) this.toInner(message, "*");
      else this.waiting.push(message);
    }
  };
}
