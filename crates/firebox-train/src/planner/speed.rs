//! How fast a device computes, and how long an iteration takes. Only ratios between operations
//! matter.

use burn_backend::DType;
use firebox_recompute::Rates;
use firebox_trace::{Mark, MemoryModel, Step, Trace};

/// How a device computes, as far as a choice depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speed {
    pub(crate) rates: Rates,
    /// The type of its booleans, if it is known.
    pub(crate) bools: Option<DType>,
}

impl Speed {
    /// `rates` are those of the device, if they are known.
    pub(crate) fn of(memory: &dyn MemoryModel, rates: Option<Rates>) -> Self {
        let assumed = if memory.is_on_host() { Rates::CPU } else { Rates::RTX_4090 };
        let rates = rates.unwrap_or(assumed);
        Self { rates, bools: None }
    }
}

/// The predicted time of an iteration.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Time {
    /// Seconds of a micro-step, in the mean.
    micro_step: f64,
    /// Seconds of everything else.
    rest: f64,
}

impl Time {
    /// The time of the last iteration of a rehearsal. The first one may be a part.
    pub(crate) fn of(trace: &Trace, rates: &Rates) -> Self {
        let ends = trace.steps.iter().enumerate().rev();
        let mut ends = ends.filter(|(_, step)| step.is_mark(&Mark::IterationEnd));
        let begin = ends.nth(1).map_or(0, |(at, _)| at + 1);
        let (mut in_micro_steps, mut micro_steps, mut rest, mut is_in) = (0.0, 0, 0.0, false);
        for (step, cost) in trace.steps.iter().zip(rates.costs(trace)).skip(begin) {
            match step {
                Step::Mark(Mark::MicroStep) => (micro_steps, is_in) = (micro_steps + 1, true),
                Step::Mark(Mark::MicroStepEnd(_)) => is_in = false,
                _ if is_in => in_micro_steps += cost,
                _ => rest += cost,
            }
        }
        Self { micro_step: in_micro_steps / f64::from(micro_steps.max(1)), rest }
    }

    /// The seconds of an iteration of so many micro-steps.
    pub(crate) fn total(&self, micro_steps: usize) -> f64 {
        self.rest + self.micro_step * micro_steps as f64
    }
}
