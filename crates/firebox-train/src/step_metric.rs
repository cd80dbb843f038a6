//! Metrics for burn's dashboard and loggers: what steps use of the memory, and how fast they are.

use std::sync::Arc;

use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use firebox_trace::Bytes;

use crate::step_use::{self, StepUse};

/// A number of the step that ended last, as a metric of burn's.
///
/// Works with any output of a model, like burn's `CpuMemory`. burn asks for it once a micro-batch,
/// and most of them come before their step has ended: they show the step before. Before the first
/// step has ended, the value is zero. If several trainings run in one process, it is that of any of
/// them.
///
/// ```
/// use burn::train::metric::Metric;
/// use firebox_train::StepMetric;
///
/// # fn add<M: Metric<Input = ()>>(_: M) {}
/// # struct Training;
/// # impl Training {
/// #     fn metric_train_numeric<M: Metric<Input = ()>>(self, metric: M) -> Self {
/// #         add(metric);
/// #         self
/// #     }
/// # }
/// # let training = Training;
/// let training = training
///     .metric_train_numeric(StepMetric::reserved())
///     .metric_train_numeric(StepMetric::items_per_second());
/// ```
#[derive(Clone, Debug)]
pub struct StepMetric {
    name: MetricName,
    unit: &'static str,
    higher_is_better: bool,
    of: fn(&StepUse) -> Option<f64>,
    value: f64,
    sum: f64,
    count: usize,
}

fn mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / 1048576.0
}

impl StepMetric {
    fn new(name: &str, unit: &'static str, of: fn(&StepUse) -> Option<f64>) -> Self {
        step_use::want();
        let name = Arc::new(name.to_owned());
        Self { name, unit, higher_is_better: false, of, value: 0.0, sum: 0.0, count: 0 }
    }

    /// The most memory predicted for the run so far, in MiB.
    pub fn predicted_peak() -> Self {
        Self::new("Predicted Peak", "MiB", |used| Some(mib(used.predicted)))
    }

    /// What the device's allocator holds for training, in MiB. On the CPU, what the process has
    /// grown by.
    pub fn reserved() -> Self {
        Self::new("Reserved Memory", "MiB", |used| used.reserved.map(mib))
    }

    /// What lies in the reserved memory after a step, in MiB. Zero on the CPU.
    pub fn in_use() -> Self {
        Self::new("Memory In Use", "MiB", |used| used.in_use.map(mib))
    }

    /// The share of the reserved memory that nothing lies in after a step, in percent. Zero on the
    /// CPU.
    pub fn fragmentation() -> Self {
        Self::new("Unused Memory", "%", |used| used.fragmentation().map(|share| share * 100.0))
    }

    /// The micro-batches that a step ran in.
    pub fn micro_batches() -> Self {
        Self::new("Micro-batches", "", |used| Some(used.micro_batches as f64))
    }

    /// The items that were trained on in a second.
    pub fn items_per_second() -> Self {
        let metric = Self::new("Items per Second", "", |used| Some(used.items_per_second));
        Self { higher_is_better: true, ..metric }
    }
}

impl Metric for StepMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        let unit = (!self.unit.is_empty()).then(|| self.unit.to_owned());
        NumericAttributes { unit, higher_is_better: self.higher_is_better }.into()
    }

    fn update(&mut self, (): &(), _: &MetricMetadata) -> SerializedEntry {
        if let Some(value) = step_use::latest().as_ref().and_then(self.of) {
            self.value = value;
            self.sum += value;
            self.count += 1;
        }
        let running = self.running_value().current();
        let formatted =
            format!("epoch {running:.2} {unit} - step {:.2} {unit}", self.value, unit = self.unit);
        SerializedEntry::new(formatted, NumericEntry::Value(self.value).serialize())
    }

    fn clear(&mut self) {
        (self.sum, self.count) = (0.0, 0);
    }
}

impl Numeric for StepMetric {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.value)
    }

    fn running_value(&self) -> NumericEntry {
        NumericEntry::Value(self.sum / self.count.max(1) as f64)
    }
}
