//! Ends a training that failed without burn's summary. burn makes it of what lies in the artifact
//! directory, which may be from an earlier run, and does not know that training failed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::train::renderer::MetricsRenderer;
use burn::train::{AsyncProcessorTraining, EventProcessorTraining, LearnerEvent};

/// burn's processor of events for outputs `T` in training and `V` in validation.
type Processor<T, V> = AsyncProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>;

/// A processor that passes on every event but the summary.
pub(super) fn without_summary<T, V>(processor: Processor<T, V>) -> Processor<T, V>
where
    T: Send + 'static,
    V: Send + 'static,
{
    AsyncProcessorTraining::new(WithoutSummary(processor))
}

struct WithoutSummary<P>(P);

impl<P, T, V> EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>> for WithoutSummary<P>
where
    P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
{
    fn process_train(&mut self, event: LearnerEvent<T>) {
        let event = match event {
            LearnerEvent::End(_) => LearnerEvent::End(None),
            event => event,
        };
        // The metrics thread may be gone. Who asks for the renderer is told: if this thread ended
        // here, nobody would answer.
        catch_unwind(AssertUnwindSafe(|| self.0.process_train(event))).ok();
    }

    fn process_valid(&mut self, event: LearnerEvent<V>) {
        self.0.process_valid(event);
    }

    fn renderer(self) -> Box<dyn MetricsRenderer> {
        self.0.renderer()
    }
}
