// What a page does by itself: it hears of news, says when nobody answers, and draws its charts.
"use strict";
(() => {
  const NEWS_REST_MS = 1000, AGAIN_MS = 3000;
  const body = document.body, link = document.getElementById("link");
  const say = (text, bad) => {
    if (link.textContent !== text) link.textContent = text;  // said aloud once, not each time
    link.classList.toggle("bad", bad);
  };
  let source = null, due = null, again = null;

  function listen() {
    clearTimeout(again);
    source?.close();
    source = null;
    if (document.hidden) return;
    const began = Date.now();
    source = new EventSource("/api/v1/events");
    source.onopen = () => say("live", false);
    source.onerror = () => {
      say("no connection: what you see may be old; training goes on", true);
      // It tries again by itself where it was cut off, but not where it was refused.
      if (source.readyState === EventSource.CLOSED) again = setTimeout(listen, AGAIN_MS);
    };
    source.onmessage = message => {
      if (JSON.parse(message.data).at * 1000 < began - 60000) return;  // what the page has already
      due ??= setTimeout(() => { due = null; body.dispatchEvent(new Event("news")); }, NEWS_REST_MS);
    };
  }

  const scrolled = new Map();
  body.addEventListener("htmx:beforeRequest", event => { if (document.hidden) event.preventDefault(); });
  body.addEventListener("htmx:beforeSwap", () => document.querySelectorAll(".scroll").forEach(
    box => scrolled.set(box.ariaLabel, box.scrollLeft)));
  body.addEventListener("htmx:afterSettle", () => document.querySelectorAll(".scroll").forEach(
    box => { box.scrollLeft = scrolled.get(box.ariaLabel) ?? 0; }));
  for (const name of ["htmx:sendError", "htmx:timeout"])
    body.addEventListener(name, () => say("the service does not answer; training goes on", true));
  body.addEventListener("htmx:responseError", event => say(event.detail.xhr.status === 503
    ? "the catalogue does not answer; training goes on"
    : `refused (${event.detail.xhr.status}): what you see may be old`, true));
  body.addEventListener("htmx:afterOnLoad", event => {
    if (event.detail.successful && source?.readyState === EventSource.OPEN) say("live", false);
  });

  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const UNITS = ["", "Ki", "Mi", "Gi", "Ti"];
  function shown(value, unit) {
    if (value == null) return "–";
    if (unit === "s") return `${+value.toPrecision(3)} s`;
    let power = 0;
    while (value >= 1024 && power < UNITS.length - 1) { value /= 1024; power += 1; }
    return `${+value.toPrecision(3)} ${UNITS[power]}${unit}`;
  }
  function draw(box) {
    if (box.firstChild || !window.uPlot) return;
    const {unit, x, steps, lines} = JSON.parse(box.dataset.chart);
    const axis = {stroke: color("--soft"), grid: {stroke: color("--line")}, ticks: {stroke: color("--line")}};
    const series = lines.map((line, place) => ({
      label: line.name, stroke: color(["--link", "--good"][place]), dash: place ? [6, 4] : [],
      points: {size: 5}, spanGaps: true, value: (_, value) => shown(value, unit)}));
    new uPlot({width: box.clientWidth, height: 190,
      axes: [axis, {...axis, size: 80, values: (_, values) => values.map(value => shown(value, unit))}],
      series: [{label: "step", value: (_, __, ___, place) => place == null ? "–" : steps[place]}, ...series],
    }, [x, ...lines.map(line => line.y)], box);
  }
  const drawn = root => root.querySelectorAll("[data-chart]").forEach(draw);
  body.addEventListener("htmx:load", event => drawn(event.detail.elt));
  document.addEventListener("visibilitychange", listen);
  async function ask() {
    const answer = document.hidden ? null : await fetch(location.href).catch(() => null);
    if (answer && answer.status !== 503) location.reload();
  }
  if (document.querySelector("[data-again]")) setInterval(ask, AGAIN_MS);
  drawn(document);
  listen();
})();
