//! The metrics of all ranks: each sums up the numeric metrics of its share, and rank 0 gets them.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::train::LearnerSummary;
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::{Aggregate, EpochSummary, EventStoreClient, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{LearningComponentsTypes, SupervisedTraining};
use serde::{Deserialize, Serialize};

use crate::settings::Settings;

/// A metric over the share of a rank, in one epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    pub(crate) name: String,
    pub(crate) of_validation: bool,
    /// The sum of the values, each times what it counts for.
    sum: f64,
    count: u64,
}

/// The numeric metrics of the ranks. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics(Arc<Mutex<Collected>>);

#[derive(Debug, Default)]
struct Collected {
    names: Vec<(MetricId, String)>,
    /// By epoch, name, and whether it is of validation: those of this rank.
    own: BTreeMap<Key, (f64, u64)>,
    /// Those of the others, at rank 0.
    others: BTreeMap<Key, Vec<(f64, u64)>>,
}

type Key = (usize, String, bool);

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A logger that collects what this rank's metrics say, and writes it to files as burn does where
    /// a directory is given. Where burn reads a metric, it reads that of all ranks.
    pub(crate) fn logger(&self, directory: Option<&Path>) -> Logger {
        Logger { metrics: self.clone(), files: directory.map(FileMetricLogger::new) }
    }

    /// What this rank's metrics say of an epoch. Waits until `store` has heard all of it.
    pub(crate) fn of_epoch(&self, store: &EventStoreClient, epoch: usize) -> Vec<Sums> {
        // The store answers after everything that it was told before.
        let _ = store.find_metric("", epoch, Aggregate::Mean, &Split::Valid);
        let collected = self.lock();
        let of_epoch = collected.own.iter().filter(|((of, _, _), _)| *of == epoch);
        of_epoch
            .map(|((_, name, of_validation), (sum, count))| Sums {
                name: name.clone(),
                of_validation: *of_validation,
                sum: *sum,
                count: *count,
            })
            .collect()
    }

    /// Notes what other ranks' metrics say of an epoch. Returns their means over all ranks, training
    /// first.
    pub(crate) fn merge(&self, epoch: usize, all: &[Vec<Sums>]) -> Vec<(String, bool, f64)> {
        let mut collected = self.lock();
        let mut totals: BTreeMap<(bool, String), (f64, u64)> = BTreeMap::new();
        for (rank, of_rank) in all.iter().enumerate() {
            for sums in of_rank {
                let total = totals.entry((sums.of_validation, sums.name.clone())).or_default();
                total.0 += sums.sum;
                total.1 += sums.count;
                if rank > 0 {
                    let key = (epoch, sums.name.clone(), sums.of_validation);
                    collected.others.entry(key).or_default().push((sums.sum, sums.count));
                }
            }
        }
        let mean = |((of_validation, name), (sum, count)): ((bool, String), (f64, u64))| {
            (name, of_validation, sum / count as f64)
        };
        totals.into_iter().map(mean).collect()
    }
}

/// Sets on burn's training what several ranks need: the first logs the metrics of all, if the user
/// asked for it; the others show and write nothing.
pub(crate) fn with_ranks<LC>(
    training: SupervisedTraining<LC>,
    settings: &Settings,
) -> SupervisedTraining<LC>
where
    LC: LearningComponentsTypes,
{
    match (&settings.ranks, settings.metrics_directory.as_deref()) {
        (Some(ranks), directory) if ranks.is_root() => match directory {
            Some(directory) => {
                training.with_metric_logger(settings.metrics.logger(Some(directory)))
            }
            None => {
                let text = "metrics are those of rank 0's share of the data; `.metrics_of_all_ranks(..)` changes that";
                settings.say(log::Level::Info, text);
                training
            }
        },
        (Some(_), _) => training
            .with_metric_logger(settings.metrics.logger(None))
            .with_application_logger(None)
            .renderer(Silent),
        (None, _) => training,
    }
}

/// The renderer of ranks other than the first.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// See [`Metrics::logger`].
pub(crate) struct Logger {
    metrics: Metrics,
    files: Option<FileMetricLogger>,
}

impl MetricLogger for Logger {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let mut collected = self.metrics.lock();
        for numeric in &update.entries_numeric {
            let id = &numeric.entry.metric_id;
            let name = collected.names.iter().find(|(known, _)| known == id);
            let Some(name) = name.map(|(_, name)| name.clone()) else { continue };
            let (value, count) = match numeric.numeric_entry {
                NumericEntry::Value(value) => (value, 1),
                NumericEntry::Aggregated { aggregated_value, count } => {
                    (aggregated_value, count as u64)
                }
            };
            let own = collected.own.entry((epoch, name, *split == Split::Valid)).or_default();
            own.0 += value * count as f64;
            own.1 += count;
        }
        drop(collected);
        if let Some(files) = &mut self.files {
            files.log(update, epoch, split);
        }
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        let Some(files) = &mut self.files else { return Ok(Vec::new()) };
        let mut read = files.read_numeric(name, epoch, split)?;
        let key = (epoch, name.to_owned(), *split == Split::Valid);
        let collected = self.metrics.lock();
        let others = collected.others.get(&key).into_iter().flatten();
        read.extend(others.filter(|(_, count)| *count > 0).map(|(sum, count)| {
            NumericEntry::Aggregated {
                aggregated_value: sum / *count as f64,
                count: *count as usize,
            }
        }));
        Ok(read)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        let known = (definition.metric_id.clone(), definition.name.clone());
        self.metrics.lock().names.push(known);
        if let Some(files) = &mut self.files {
            files.log_metric_definition(definition);
        }
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        if let Some(files) = &mut self.files {
            files.log_epoch_summary(summary);
        }
    }
}
