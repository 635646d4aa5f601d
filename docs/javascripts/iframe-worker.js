/* Search without a server: browsers start no Worker from file://, so its script runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const page = this.inside.document;
      page.open();
      page.write("<!doctype html><body></body>");
      page.close();
      this.inside.postMessage = answer;
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, source) => before.then(() => this.add(source)), Promise.resolve());
      this.ready = this.add(url);
    }

    add(source) {
      return new Promise((done, fail) => {
        const script = this.inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = fail;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
