//! Shows a run on the terminal: a bar while an epoch runs, a line when it ends, and what is being
//! planned. The training loop and burn's metrics thread share a [`Screen`].
//!
//! It goes to stderr, so that stdout belongs to the program, and to burn's summary if one was asked
//! for. Without a terminal there are only the lines.

mod epoch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use firebox_saved::RecordingProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use self::epoch::{Epoch, width};
use crate::error::Phase;
use crate::report::MemoryUse;

/// Planning shows once it has taken this long.
const PATIENCE: Duration = Duration::from_millis(500);

/// How often a spinner turns.
const TURN: Duration = Duration::from_millis(100);

const BAR: &str = "{prefix} {bar:24.green} {percent:>3} %  {wide_msg}";
const SPINNER: &str = "{spinner} {wide_msg}";

/// Where a run is shown. Clones show the same.
#[derive(Clone)]
pub(crate) struct Screen(Arc<Mutex<Shown>>);

struct Shown {
    bar: ProgressBar,
    /// The template of the bar, which takes time to parse.
    template: &'static str,
    /// Planning that has begun.
    planning: Option<Planning>,
    epoch: Epoch,
    /// The columns of the lines that were written, by their heads.
    heads: String,
    /// Lines that were written, in tests.
    #[cfg(test)]
    lines: Vec<String>,
}

struct Planning {
    since: Instant,
    rehearsals: usize,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Screen")
    }
}

impl Screen {
    /// The terminal, if stderr is one.
    pub(crate) fn new() -> Self {
        Self::on(ProgressDrawTarget::stderr())
    }

    fn on(target: ProgressDrawTarget) -> Self {
        let bar = ProgressBar::with_draw_target(None, target).with_style(style(SPINNER));
        Self(Arc::new(Mutex::new(Shown {
            bar,
            template: SPINNER,
            planning: None,
            epoch: Epoch::default(),
            heads: String::new(),
            #[cfg(test)]
            lines: Vec::new(),
        })))
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a text above the bar.
    pub(crate) fn write(&self, text: &str) {
        self.shown().write(text);
    }

    /// Begins to train in an epoch.
    pub(crate) fn begin_epoch(&self) {
        self.shown().epoch.begins();
    }

    /// Notes that a batch of `items` items is rehearsed. A spinner says so if planning began more
    /// than half a second ago.
    pub(crate) fn rehearsed(&self, phase: Phase, items: usize) {
        self.shown().waits(|rehearsals, seconds| {
            format!("planning {phase} batches of {items}: {rehearsals} rehearsals, {seconds:.1} s")
        });
    }

    /// Notes how far a trace is recorded. A spinner says so as for rehearsals.
    pub(crate) fn records(&self, at: RecordingProgress) {
        let RecordingProgress { number, of } = at;
        self.shown().waits(|_, seconds| {
            format!("recording a trace to save: {number} of {of}, {seconds:.1} s")
        });
    }

    /// Ends planning, if it has begun.
    pub(crate) fn planned(&self) {
        let mut shown = self.shown();
        if shown.planning.take().is_some() {
            shown.bar.disable_steady_tick();
            shown.bar.set_message("");
            // Planning is no time in which items were trained on.
            shown.epoch.waited();
        }
    }

    /// Moves the bar within a batch whose output comes at its end.
    pub(crate) fn moves(&self, phase: Phase, at: &TrainingProgress) {
        self.shown().render(phase, at);
    }

    /// Ends an epoch: writes its line.
    pub(crate) fn end_epoch(&self, memory: Option<MemoryUse>) {
        let mut shown = self.shown();
        let epoch = std::mem::take(&mut shown.epoch);
        shown.epoch.names = epoch.names.clone();
        let (heads, line) = epoch.line(memory, width());
        if shown.heads != heads {
            shown.write(&heads);
            shown.heads = heads;
        }
        shown.write(&line);
        shown.bar.set_message("");
    }

    /// Takes the bar away.
    pub(crate) fn close(&self) {
        let shown = self.shown();
        shown.bar.disable_steady_tick();
        shown.bar.finish_and_clear();
    }
}

impl Shown {
    /// Shows what training waits for once it has waited long enough. `text` gets how often this was
    /// called meanwhile, and the seconds.
    fn waits(&mut self, text: impl FnOnce(usize, f64) -> String) {
        let now = Instant::now();
        let planning = self.planning.get_or_insert(Planning { since: now, rehearsals: 0 });
        planning.rehearsals += 1;
        let Planning { since, rehearsals } = *planning;
        if now - since < PATIENCE {
            return;
        }
        self.use_template(SPINNER);
        self.bar.enable_steady_tick(TURN);
        self.bar.set_message(text(rehearsals, (now - since).as_secs_f64()));
    }

    fn write(&mut self, text: &str) {
        #[cfg(test)]
        self.lines.extend(text.lines().map(str::to_owned));
        self.bar.suspend(|| eprintln!("{text}"));
    }

    fn use_template(&mut self, template: &'static str) {
        if self.template != template {
            self.template = template;
            self.bar.set_style(style(template));
        }
    }

    fn render(&mut self, phase: Phase, at: &TrainingProgress) {
        self.epoch.moves(phase, at);
        let Some(progress) = &at.progress else { return };
        if self.planning.is_some() || self.bar.is_hidden() {
            return;
        }
        let (done, total) = (progress.items_processed as u64, progress.items_total as u64);
        let epoch = &at.global_progress;
        let part = if phase == Phase::Training { "epoch" } else { "valid" };
        self.use_template(BAR);
        self.bar.set_length(total);
        self.bar.set_prefix(format!("{part} {}/{}", epoch.items_processed, epoch.items_total));
        self.bar.set_message(self.epoch.metrics(phase));
        self.bar.set_position(done);
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).expect("the template is right");
    style.progress_chars("━╸─")
}

/// The renderer that burn's metrics thread tells about outputs.
pub(crate) struct Renderer(pub(crate) Screen);

impl MetricsRendererTraining for Renderer {
    fn update_train(&mut self, state: MetricState) {
        self.0.shown().epoch.add(Phase::Training, &state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.0.shown().epoch.add(Phase::Validation, &state);
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        self.0.shown().render(Phase::Training, &item);
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        self.0.shown().render(Phase::Validation, &item);
    }

    fn on_train_end(
        &mut self,
        summary: Option<burn::train::LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.0.close();
        if let Some(summary) = summary {
            println!("{summary}");
        }
        Ok(())
    }
}

impl MetricsRendererEvaluation for Renderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Renderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.0.shown().epoch.names.add(definition);
    }
}

#[cfg(test)]
mod tests;
