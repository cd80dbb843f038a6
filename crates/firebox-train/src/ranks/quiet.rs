//! What ranks show and log: the first does as burn does, the others nothing. `fit` sets it on
//! burn's training.

use std::error::Error;

use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{LearnerSummary, LearningComponentsTypes, SupervisedTraining};

use crate::settings::Settings;

/// Sets on burn's training what several ranks need: the first logs the metrics of all, if the user
/// asked for it; the others show and write nothing.
pub(crate) fn with_ranks<LC>(
    training: SupervisedTraining<LC>,
    settings: &Settings,
) -> SupervisedTraining<LC>
where
    LC: LearningComponentsTypes,
{
    match (&settings.ranks, settings.telling.metrics_directory.as_deref()) {
        (Some(ranks), directory) if ranks.is_root() => match directory {
            Some(directory) => {
                training.with_metric_logger(settings.telling.metrics.logger(Some(directory)))
            }
            None => {
                let text = "metrics are those of rank 0's share of the data; `.metrics_of_all_ranks(..)` changes that";
                settings.say(log::Level::Info, text);
                training
            }
        },
        (Some(_), _) => training
            .with_metric_logger(settings.telling.metrics.logger(None))
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
