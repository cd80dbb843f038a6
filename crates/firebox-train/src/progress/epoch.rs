//! What an epoch has shown so far: means of its metrics, items and time. `progress.rs` shows it.

use std::time::{Duration, Instant};

use burn::train::metric::{MetricAttributes, MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{MetricState, TrainingProgress};
use indicatif::HumanCount;

use crate::error::Phase;
use crate::report::MemoryUse;

/// The columns of a terminal that does not tell them.
const COLUMNS: usize = 80;

/// The space between two columns.
const GAP: &str = "  ";

/// The columns of the terminal.
pub(super) fn width() -> usize {
    let columns = console::Term::stderr().size_checked().map(|(_, columns)| usize::from(columns));
    columns.unwrap_or(COLUMNS)
}

/// The metrics that burn has announced. burn knows a metric by its name, in training and in
/// validation.
#[derive(Clone, Debug, Default)]
pub(super) struct Names(Vec<(MetricId, String, String)>);

impl Names {
    /// Adds a metric.
    pub(super) fn add(&mut self, definition: MetricDefinition) {
        let unit = match definition.attributes {
            MetricAttributes::Numeric(numeric) => numeric.unit.unwrap_or_default(),
            MetricAttributes::None => String::new(),
        };
        self.0.push((definition.metric_id, definition.name, unit));
    }

    fn of(&self, id: &MetricId) -> Option<(&str, &str)> {
        let found = self.0.iter().find(|(known, ..)| known == id);
        found.map(|(_, name, unit)| (name.as_str(), unit.as_str()))
    }
}

/// The mean of a metric over an epoch.
#[derive(Clone, Debug)]
struct Mean {
    phase: Phase,
    metric: MetricId,
    sum: f64,
    weight: f64,
}

/// An epoch so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Epoch {
    pub(super) names: Names,
    means: Vec<Mean>,
    /// Its number and how many there are.
    number: Option<(usize, usize)>,
    /// The items trained on, and how long that has taken.
    items: usize,
    time: Duration,
    /// When the latest items were done.
    latest: Option<Instant>,
}

impl Epoch {
    /// Adds a value of a metric.
    pub(super) fn add(&mut self, phase: Phase, state: &MetricState) {
        let MetricState::Numeric(entry, value) = state else { return };
        let weight = match value {
            NumericEntry::Value(_) => 1.0,
            NumericEntry::Aggregated { count, .. } => *count as f64,
        };
        let metric = entry.metric_id.clone();
        let is_same = |mean: &&mut Mean| mean.phase == phase && mean.metric == metric;
        match self.means.iter_mut().find(is_same) {
            Some(mean) => {
                mean.sum += weight * value.current();
                mean.weight += weight;
            }
            None => self.means.push(Mean { phase, metric, sum: weight * value.current(), weight }),
        }
    }

    /// Notes that an output has come.
    pub(super) fn moves(&mut self, phase: Phase, at: &TrainingProgress) {
        let epoch = &at.global_progress;
        self.number = Some((epoch.items_processed, epoch.items_total));
        let Some(progress) = at.progress.as_ref().filter(|_| phase == Phase::Training) else {
            return;
        };
        let now = Instant::now();
        if let Some(latest) = self.latest.replace(now) {
            self.time += now - latest;
        }
        self.items = progress.items_processed;
    }

    /// Begins to count time.
    pub(super) fn begins(&mut self) {
        self.latest = Some(Instant::now());
    }

    /// Notes that what has passed since the latest output was not training.
    pub(super) fn waited(&mut self) {
        self.latest = self.latest.map(|_| Instant::now());
    }

    /// The means of a phase, for the bar.
    pub(super) fn metrics(&self, phase: Phase) -> String {
        let means = self.means.iter().filter(|mean| mean.phase == phase);
        let texts = means.filter_map(|mean| {
            let (name, unit) = self.names.of(&mean.metric)?;
            Some(format!("{name} {}", number(mean.sum / mean.weight, unit)))
        });
        texts.collect::<Vec<_>>().join(GAP)
    }

    /// The line of the epoch, and the heads of its columns. If they are wider than `width`, names
    /// stand in the line instead, in several lines if need be.
    pub(super) fn line(&self, memory: Option<MemoryUse>, width: usize) -> (String, String) {
        let columns = self.columns(memory);
        let widths = columns.iter().map(|(head, cell)| cell.len().max(head.len()).max(7));
        let widths: Vec<usize> = widths.collect();
        if widths.iter().sum::<usize>() + GAP.len() * (widths.len() - 1) <= width {
            let row = |cells: Vec<&String>| {
                let cells =
                    cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
                cells.collect::<Vec<_>>().join(GAP)
            };
            let heads = row(columns.iter().map(|(head, _)| head).collect());
            return (heads, row(columns.iter().map(|(_, cell)| cell).collect()));
        }
        let mut lines = vec![String::new()];
        for (head, cell) in columns {
            let text = format!("{head} {cell}");
            let line = lines.last_mut().expect("there is one");
            if line.is_empty() {
                *line = text;
            } else if line.len() + GAP.len() + text.len() <= width {
                *line += &format!("{GAP}{text}");
            } else {
                lines.push(format!("{GAP}{text}"));
            }
        }
        (String::new(), lines.join("\n"))
    }

    /// The columns: head and cell.
    fn columns(&self, memory: Option<MemoryUse>) -> Vec<(String, String)> {
        let mut columns = Vec::new();
        let mut add = |head: &str, cell: String| columns.push((head.to_owned(), cell));
        if let Some((number, all)) = self.number {
            add("epoch", format!("{number}/{all}"));
        }
        let of_phase = |phase| self.means.iter().filter(move |mean| mean.phase == phase);
        let value = |mean: &Mean, unit| number(mean.sum / mean.weight, unit);
        let mut shown = Vec::new();
        for mean in of_phase(Phase::Training) {
            let Some((name, unit)) = self.names.of(&mean.metric) else { continue };
            add(name, value(mean, unit));
            let valid = of_phase(Phase::Validation)
                .find(|valid| self.names.of(&valid.metric) == Some((name, unit)));
            if let Some(valid) = valid {
                add("valid", value(valid, unit));
                shown.push(name);
            }
        }
        for mean in of_phase(Phase::Validation) {
            let named = self.names.of(&mean.metric).filter(|(name, _)| !shown.contains(name));
            if let Some((name, unit)) = named {
                add(&format!("valid {name}"), value(mean, unit));
            }
        }
        if self.time > Duration::ZERO {
            let speed = self.items as f64 / self.time.as_secs_f64();
            let text = match speed < 100.0 {
                true => format!("{speed:.2}"),
                false => HumanCount(speed as u64).to_string(),
            };
            add("items/s", text);
        }
        if let Some(memory) = memory {
            add("predicted", memory.predicted.to_string());
            if let Some(measured) = memory.measured {
                add(if memory.of_process { "process" } else { "measured" }, measured.to_string());
            }
        }
        columns
    }
}

/// A value in four digits, or in two decimals if it is a share.
fn number(value: f64, unit: &str) -> String {
    let text = match value.abs() {
        _ if unit == "%" => return format!("{value:.2}%"),
        small if small < 1e-3 && small > 0.0 => format!("{value:.2e}"),
        large if large >= 1e5 => format!("{value:.3e}"),
        _ => format!("{value:.4}"),
    };
    if unit.is_empty() { text } else { format!("{text} {unit}") }
}
