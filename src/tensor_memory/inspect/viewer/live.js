// A page that is served while its recording goes on asks for newer states of it.

const ASK_EVERY = 1000; // ms

// Calls `update` with every newer recording; `recording.live` names the state that is shown.
async function followLive(update) {
  for (;;) {
    await new Promise((done) => setTimeout(done, ASK_EVERY));
    try {
      const version = await (await fetch("version")).text();
      if (version && version !== recording.live) update(await (await fetch("recording")).json());
      tellLive("");
    } catch {
      tellLive("nothing answers: the command has ended");
    }
  }
}

function tellLive(text) {
  if (text || find("copied").textContent.startsWith("nothing answers")) find("copied").textContent = text;
}
