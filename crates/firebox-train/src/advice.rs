//! Advice: what would need less memory, and how much less, computed from the trace.

use std::fmt;

use firebox_plan::Split;
use firebox_saved::SavedTrace;
use firebox_trace::{Bytes, Category, TensorInfo, Trace};

use crate::error::TrainError;
use crate::report::PlanReport;
use crate::saved::SavedPlanner;

/// How many modules are named.
const MODULES: usize = 3;

/// Smaller batches that are tried, as parts of the batch: one in a hundred less each time.
const SMALLER: usize = 8;

/// Something that would need less memory. Displays as a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What to do.
    pub what: String,
    /// By how many bytes the peak is lower then, at most: another moment may need nearly as much.
    pub saves: Bytes,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {} less with {}", self.saves, self.what)
    }
}

impl SavedPlanner {
    /// What would need less memory than `plan` for `items` items, or than the whole batch if
    /// nothing fits, the most first.
    ///
    /// The savings of a smaller batch, of computing again and of parked state are those of other
    /// predictions. Others are what the peak holds for it, which is an upper bound but for the ends
    /// of pages.
    ///
    /// # Errors
    ///
    /// As [`footprint`](Self::footprint).
    pub fn advice(
        &self,
        trace: &SavedTrace,
        items: usize,
        plan: Option<&PlanReport>,
    ) -> Result<Vec<Advice>, TrainError> {
        let split = plan.map_or(Split::whole(items), |report| report.plan.split());
        let as_recorded = || self.footprint(trace, split).map(|(_, footprint)| footprint);
        // Nothing is compared with a plan that computes tensors again.
        let (recorded, categories, state, whole) = match plan {
            Some(report) => {
                let recorded = report.recomputed.is_none().then(as_recorded).transpose()?;
                let state = report.optimizer_state - report.parked;
                let whole = report.plan.is_whole().then(|| report.predicted());
                (recorded, report.categories, state, whole)
            }
            None => {
                let recorded = as_recorded()?;
                let (categories, peak) = (recorded.categories, recorded.peak);
                let state = categories.get(Category::OptimizerState);
                (Some(recorded), categories, state, Some(peak))
            }
        };
        let mut advice = Vec::new();
        let mut add = |what: String, saves: Bytes| {
            if saves > Bytes::ZERO {
                advice.push(Advice { what, saves });
            }
        };
        // A batch that no memory holds has no peak to compare with.
        if let Some(peak) = whole.filter(|peak| *peak < Bytes::MAX) {
            let smaller = self.just_below_a_cliff(trace, items, peak)?;
            smaller.into_iter().for_each(|(size, saves)| add(format!("a batch of {size}"), saves));
        }
        add("SGD without momentum, which has no optimizer state".into(), state);
        if has_wide_parameters(&trace.sample(Split::whole(items))?.trace) {
            let of = [Category::Parameter, Category::Gradient, Category::AccumulatedGradient];
            let held: Bytes = of.into_iter().map(|of| categories.get(of)).sum();
            let what = "16-bit parameters, gradients and optimizer state";
            add(what.into(), (held + state).scale(0.5));
        }
        if let Some(recorded) = &recorded
            && let Some((least, overhead)) = self.least(trace, split)?
        {
            let percent = 100.0 * overhead;
            let what = format!("activations computed again, for {percent:.0} % more time");
            add(what, recorded.peak - least);
        }
        if let Some(recorded) = recorded.filter(|_| state > Bytes::ZERO) {
            let (_, parked) = self.clone().park_optimizer().footprint(trace, split)?;
            add("the optimizer's state parked between steps".into(), recorded.peak - parked.peak);
        }
        plan.into_iter().flat_map(without).for_each(|(what, saves)| add(what, saves));
        advice.sort_by(|one, other| other.saves.cmp(&one.saves).then(one.what.cmp(&other.what)));
        Ok(advice)
    }

    /// A slightly smaller batch that needs far less, if there is one: where an allocator reserves
    /// whole pages, one item may take a page. The size, and how much less.
    fn just_below_a_cliff(
        &self,
        trace: &SavedTrace,
        items: usize,
        peak: Bytes,
    ) -> Result<Option<(usize, Bytes)>, TrainError> {
        if !self.keeps_pages() {
            return Ok(None);
        }
        for part in 1..=SMALLER {
            let size = items - (items * part).div_ceil(100);
            if size == 0 {
                break;
            }
            let (_, footprint) = self.footprint(trace, Split::whole(size))?;
            let saves = peak - footprint.peak;
            // More than twice its share of the items.
            let share = peak.scale(2.0 * (items - size) as f64 / items as f64);
            if saves > share {
                return Ok(Some((size, saves)));
            }
        }
        Ok(None)
    }
}

/// Whether a parameter has more than 16 bits.
fn has_wide_parameters(steps: &Trace) -> bool {
    let is_wide = |tensor: &TensorInfo| {
        let category = tensor.label.as_deref().map(|label| label.category);
        category == Some(Category::Parameter) && tensor.dtype.size() > 2
    };
    steps.tensors.iter().any(is_wide)
}

/// What the plan counts in addition to the step, and the modules that hold most.
fn without(report: &PlanReport) -> Vec<(String, Bytes)> {
    let mut advice = vec![
        ("metrics that hold no outputs".to_owned(), report.overhead.outputs),
        ("no checkpoint while training goes on".to_owned(), report.overhead.saving),
    ];
    let modules =
        report.modules.iter().filter_map(|held| Some((held.module.as_ref()?, held.bytes)));
    let modules = modules.take(MODULES);
    advice.extend(modules.map(|(module, bytes)| (format!("nothing held by `{module}`"), bytes)));
    advice
}
