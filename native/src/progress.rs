//! Shows planning that takes a while: the first rehearsal of a size compiles its kernels.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Planning shows once it has taken this long.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the spinner turns.
const TURN: Duration = Duration::from_millis(100);

/// The planning of one batch, shown on standard error if that is a terminal.
pub(crate) struct Planning {
    since: Instant,
    items: usize,
    /// The spinner, once it shows.
    bar: Option<ProgressBar>,
    shows: bool,
}

impl Planning {
    /// Begins to plan a batch of so many items.
    pub(crate) fn begin(items: usize, shows: bool) -> Self {
        Self { since: Instant::now(), items, bar: None, shows }
    }

    /// Tells that parts of `size` items are about to be rehearsed.
    pub(crate) fn rehearses(&mut self, size: usize) {
        self.show(|items| format!("planning batches of {items}: a step on {size} items"));
    }

    /// Tells that a recording of several is about to be made, counted from one.
    #[cfg(feature = "cubecl")]
    pub(crate) fn records(&mut self, number: usize, of: usize) {
        self.show(|_| format!("recording {number} of {of}"));
    }

    fn show(&mut self, text: impl FnOnce(usize) -> String) {
        if !self.shows || self.since.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("{spinner} {wide_msg}");
            let bar = ProgressBar::new_spinner().with_style(style.expect("it is well formed"));
            bar.enable_steady_tick(TURN);
            bar
        });
        bar.set_message(text(self.items));
    }
}

impl Drop for Planning {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
