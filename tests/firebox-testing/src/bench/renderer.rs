//! A renderer that shows nothing and notices when batches end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

/// Calls a function whenever an output of training has reached the metrics.
pub struct OnOutput<F>(pub F);

impl<F: FnMut(&TrainingProgress) + Send + Sync> MetricsRendererTraining for OnOutput<F> {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, progress: TrainingProgress, _: Vec<ProgressType>) {
        self.0(&progress);
    }

    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl<F: Send + Sync> MetricsRendererEvaluation for OnOutput<F> {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl<F: FnMut(&TrainingProgress) + Send + Sync> MetricsRenderer for OnOutput<F> {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// When the last output of each batch of an epoch has reached the metrics.
#[derive(Clone, Default)]
pub struct BatchEnds(Arc<Mutex<BTreeMap<usize, Instant>>>);

impl BatchEnds {
    /// A renderer that notes them.
    pub fn renderer(&self) -> impl MetricsRenderer + use<> {
        let ends = self.0.clone();
        OnOutput(move |progress: &TrainingProgress| {
            let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
            ends.insert(progress.iteration.unwrap_or_default(), Instant::now());
        })
    }

    /// In the order of the batches.
    pub fn get(&self) -> Vec<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().copied().collect()
    }
}
