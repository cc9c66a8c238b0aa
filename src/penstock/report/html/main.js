// Puts the page together from the report's data.

function drawHead(report) {
  document.title = report.title;
  byId("title").textContent = report.title;
  byId("about").textContent = report.about;
  byId("versions").textContent = report.versions;
}

function drawTimelines(report) {
  const drawn = report.runs.filter((run) => (run.timeline.predicted || []).length || (run.timeline.measured || []).length);
  byId("timeline").hidden = !drawn.length;
  if (!drawn.length) return null;
  const view = new TimelineView(byId("timeline-canvas"), byId("timeline-status"), report.bucket_colours);
  const show = (index) => {
    view.load(drawn[index].timeline);
    byId("timeline-about").textContent = drawn[index].timeline_about;
  };
  byId("timeline-choice").replaceChildren(...[chooser("Timeline of", drawn.map((run) => run.name), show)].filter(Boolean));
  byId("zoom-in").addEventListener("click", () => view.zoom(0.6));
  byId("zoom-out").addEventListener("click", () => view.zoom(1 / 0.6));
  byId("zoom-all").addEventListener("click", () => view.show(0, view.end));
  show(0);
  return view;
}

const REPORT = JSON.parse(byId("report-data").textContent);
drawHead(REPORT);
drawMethods(REPORT);
drawAllCurves(REPORT);
drawBreakdown(REPORT);
const TIMELINE = drawTimelines(REPORT);
drawPlans(REPORT);
const WHAT_IF = drawWhatIf(REPORT);
document.querySelectorAll(".scroll").forEach(hintAtMore);
document.documentElement.dataset.ready = "true";
