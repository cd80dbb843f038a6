//! The metrics of all ranks: each sums up the numeric metrics of its share, and rank 0 gets them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::{Aggregate, EpochSummary, EventStoreClient, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use serde::{Deserialize, Serialize};

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
    /// The epoch of the loop. burn's store counts from one again where training resumes.
    epoch: usize,
    names: Vec<(MetricId, String)>,
    /// By name, and whether it is of validation: the values of this rank in this epoch.
    own: BTreeMap<(String, bool), (f64, u64)>,
}

/// The mean of a metric over all ranks: its name, whether it is of validation, and the mean.
pub(crate) type Mean = (String, bool, f64);

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A logger that collects what this rank's metrics say, and writes it to files as burn does
    /// where a directory is given.
    pub(crate) fn logger(&self, directory: Option<&Path>) -> Logger {
        Logger { metrics: self.clone(), files: directory.map(FileMetricLogger::new) }
    }

    /// Notes that an epoch begins.
    pub(crate) fn begin(&self, epoch: usize) {
        let mut collected = self.lock();
        collected.epoch = epoch;
        collected.own.clear();
    }

    /// What this rank's metrics say of the epoch. Waits until `store` has heard all of it.
    pub(crate) fn of_epoch(&self, store: &EventStoreClient) -> Vec<Sums> {
        let epoch = self.lock().epoch;
        // The store answers after everything that it was told before. There is no such metric.
        let _ = store.find_metric("", epoch, Aggregate::Mean, &Split::Valid);
        let sums = |((name, of_validation), (sum, count)): (&(String, bool), &(f64, u64))| Sums {
            name: name.clone(),
            of_validation: *of_validation,
            sum: *sum,
            count: *count,
        };
        self.lock().own.iter().map(sums).collect()
    }

    /// Adds what the other ranks' metrics say of the epoch to rank 0's files in `directory`, where
    /// burn looks for it. Returns the means over all ranks, those of training first.
    pub(crate) fn merge(
        &self,
        directory: &Path,
        all: &[Vec<Sums>],
    ) -> Result<Vec<Mean>, (PathBuf, io::Error)> {
        let epoch = self.lock().epoch;
        let mut totals: BTreeMap<(bool, String), (f64, u64)> = BTreeMap::new();
        for (rank, of_rank) in all.iter().enumerate() {
            for sums in of_rank.iter().filter(|sums| sums.count > 0) {
                let total = totals.entry((sums.of_validation, sums.name.clone())).or_default();
                total.0 += sums.sum;
                total.1 += sums.count;
                if rank > 0 {
                    let path = file(directory, epoch, sums);
                    append(&path, sums).map_err(|error| (path, error))?;
                }
            }
        }
        let mean = |((of_validation, name), (sum, count)): ((bool, String), (f64, u64))| {
            (name, of_validation, sum / count as f64)
        };
        Ok(totals.into_iter().map(mean).collect())
    }
}

/// The file in which burn's logger keeps a metric of an epoch.
fn file(directory: &Path, epoch: usize, sums: &Sums) -> PathBuf {
    let split = if sums.of_validation { Split::Valid } else { Split::Train };
    let name = format!("{}.log", sums.name.replace(' ', "_"));
    directory.join(split.to_string()).join(format!("epoch-{epoch}")).join(name)
}

/// Adds a line to a closed file of burn's logger.
fn append(path: &Path, sums: &Sums) -> io::Result<()> {
    // The name comes from another rank.
    let is_plain = Path::new(&sums.name).components().count() == 1;
    if !is_plain {
        return Err(io::Error::other("another rank has a metric of a strange name"));
    }
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    let mean = NumericEntry::Aggregated {
        aggregated_value: sums.sum / sums.count as f64,
        count: sums.count as usize,
    };
    let mut file = File::options().append(true).create(true).open(path)?;
    writeln!(file, "{}", mean.serialize())
}

/// See [`Metrics::logger`].
pub(crate) struct Logger {
    metrics: Metrics,
    files: Option<FileMetricLogger>,
}

impl MetricLogger for Logger {
    fn log(&mut self, update: MetricsUpdate, _: usize, split: &Split) {
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
            let own = collected.own.entry((name, *split == Split::Valid)).or_default();
            own.0 += value * count as f64;
            own.1 += count;
        }
        let epoch = collected.epoch;
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
        match &mut self.files {
            Some(files) => files.read_numeric(name, epoch, split),
            None => Ok(Vec::new()),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(of_validation: bool, sum: f64, count: u64) -> Vec<Sums> {
        vec![Sums { name: "The Loss".to_owned(), of_validation, sum, count }]
    }

    #[test]
    fn burn_reads_the_values_of_all_ranks_by_their_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let metrics = Metrics::default();
        metrics.begin(3);
        let epoch = folder.path().join("valid/epoch-3");
        std::fs::create_dir_all(&epoch).expect("a folder");
        std::fs::write(epoch.join("The_Loss.log"), "2,3\n").expect("a file");
        let all = [sums(true, 6.0, 3), sums(true, 10.0, 1), sums(true, f64::NAN, 0)];
        let means = metrics.merge(folder.path(), &all).expect("it is writable");
        assert_eq!(means, [("The Loss".to_owned(), true, 4.0)]);
        let read = metrics.logger(Some(folder.path())).read_numeric("The Loss", 3, &Split::Valid);
        let read: Vec<(f64, usize)> = read
            .expect("it is readable")
            .iter()
            .map(|entry| match entry {
                NumericEntry::Value(value) => (*value, 1),
                NumericEntry::Aggregated { aggregated_value, count } => (*aggregated_value, *count),
            })
            .collect();
        assert_eq!(read, [(2.0, 3), (10.0, 1)]);
    }

    #[test]
    fn a_name_from_another_rank_leads_nowhere_else() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(folder.path().join("valid/epoch-0")).expect("a folder");
        let mut bad = sums(true, 1.0, 1);
        bad[0].name = "../../outside".to_owned();
        let merged = Metrics::default().merge(folder.path(), &[Vec::new(), bad]);
        assert!(merged.is_err() && !folder.path().join("outside.log").exists());
    }
}
