//! Tests of the screen on a terminal in memory.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::train::metric::{
    AccuracyMetric, LossMetric, Metric, MetricDefinition, MetricEntry, MetricId, NumericEntry,
    SerializedEntry,
};
use firebox_trace::Bytes;
use indicatif::InMemoryTerm;

use super::*;

type Loss = LossMetric<burn::backend::Flex>;
type Accuracy = AccuracyMetric<burn::backend::Flex>;

fn id(number: usize) -> MetricId {
    MetricId::new(Arc::new(format!("metric {number}")))
}

fn define<Me: Metric>(number: usize, metric: &Me) -> MetricDefinition {
    MetricDefinition::new(id(number), metric)
}

fn value(number: usize, value: f64, count: usize) -> MetricState {
    let serialized = SerializedEntry { formatted: String::new(), serialized: String::new() };
    let entry = MetricEntry::new(id(number), serialized);
    MetricState::Numeric(entry, NumericEntry::Aggregated { aggregated_value: value, count })
}

fn at(epoch: usize, items: usize) -> TrainingProgress {
    TrainingProgress {
        progress: Some(Progress { items_processed: items, items_total: 1437 }),
        global_progress: Progress { items_processed: epoch, items_total: 8 },
        iteration: Some(1),
    }
}

/// A screen with the metrics of a classification, and what is on it.
fn screen() -> (Screen, Renderer, InMemoryTerm) {
    let term = InMemoryTerm::new(10, 80);
    let screen = Screen::on(ProgressDrawTarget::term_like(Box::new(term.clone())));
    let mut renderer = Renderer(screen.clone());
    renderer.register_metric(define(0, &Loss::new()));
    renderer.register_metric(define(1, &Accuracy::new()));
    (screen, renderer, term)
}

fn memory() -> MemoryUse {
    let measured = Some(Bytes::mib(20));
    MemoryUse { predicted: Bytes::mib(21), measured, ..MemoryUse::default() }
}

#[test]
fn a_bar_moves_and_an_epoch_ends_with_its_means() {
    let (screen, mut renderer, term) = screen();
    renderer.update_train(value(0, 2.0, 100));
    renderer.update_train(value(0, 1.0, 300));
    renderer.update_train(value(1, 50.0, 100));
    renderer.render_train(at(1, 256), Vec::new());
    let shown = term.contents();
    assert!(shown.starts_with("epoch 1/8 ━━"), "{shown}");
    assert!(shown.contains(" 18 %  Loss 1.2500  Accuracy 50.00%"), "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    renderer.update_valid(value(0, 0.5, 360));
    renderer.update_valid(value(1, 87.5, 360));
    renderer.render_valid(at(1, 360), Vec::new());
    let shown = term.contents();
    assert!(shown.starts_with("valid 1/8 ━━"), "{shown}");
    assert!(shown.contains(" 25 %  Loss 0.5000  Accuracy 87.50%"), "{shown}");
    screen.end_epoch(Some(memory()));
    renderer.update_train(value(0, 0.25, 1));
    renderer.render_train(at(2, 1), Vec::new());
    screen.end_epoch(Some(memory()));
    screen.close();
    assert_eq!(term.contents(), "");
    let heads = "  epoch     Loss    valid  Accuracy    valid  predicted   measured";
    let first = "    1/8   1.2500   0.5000    50.00%   87.50%  21.00 MiB  20.00 MiB";
    // The metrics of the second epoch begin anew, and its columns are others.
    let other =
        ["  epoch     Loss  predicted   measured", "    2/8   0.2500  21.00 MiB  20.00 MiB"];
    assert_eq!(screen.shown().lines, [heads, first, other[0], other[1]]);
}

#[test]
fn speed_counts_the_time_of_the_first_output() {
    let (screen, mut renderer, _) = screen();
    screen.begin_epoch();
    std::thread::sleep(std::time::Duration::from_millis(50));
    renderer.render_train(at(1, 40), Vec::new());
    screen.end_epoch(None);
    let lines = screen.shown().lines.clone();
    assert_eq!(lines[0], "  epoch  items/s", "{lines:?}");
    let speed: f64 = lines[1].split_whitespace().last().expect("a cell").parse().expect("a number");
    // 40 items in at least 50 ms.
    assert!(speed > 0.0 && speed <= 800.0, "{lines:?}");
}

#[test]
fn planning_shows_once_it_takes_long() {
    let (screen, _, term) = screen();
    screen.rehearsed(Phase::Training, 256);
    assert_eq!(term.contents(), "");
    std::thread::sleep(PATIENCE);
    screen.rehearsed(Phase::Training, 256);
    let shown = term.contents();
    assert!(shown.contains("planning training batches of 256: 2 rehearsals, "), "{shown}");
    screen.planned();
    assert!(!term.contents().contains("planning"), "{}", term.contents());
}

#[test]
fn many_columns_are_named_in_several_lines() {
    let (_, mut renderer, _) = screen();
    for number in 2..12 {
        renderer.register_metric(define(number, &Loss::new()));
    }
    let mut epoch = std::mem::take(&mut renderer.0.shown().epoch);
    for number in 0..12 {
        epoch.add(Phase::Training, &value(number, 1e-5, 1));
    }
    let (heads, line) = epoch.line(Some(memory()), 80);
    assert_eq!(heads, "");
    assert!(line.lines().count() > 1 && line.lines().all(|line| line.len() <= 80), "{line}");
    assert_eq!(line.matches("Loss 1.00e-5").count(), 11, "{line}");
    assert_eq!(line.matches("Accuracy 0.00%").count(), 1, "{line}");
}
