//! Advice: what would need less memory, and how much less, computed from the trace.

use firebox_plan::{Advice, Split};
use firebox_saved::SavedTrace;
use firebox_trace::{Bytes, Category, TensorInfo, Trace};

use crate::error::TrainError;
use crate::report::PlanReport;
use crate::saved::SavedPlanner;

/// How many modules are named.
const MODULES: usize = 3;

impl SavedPlanner {
    /// What would need less memory than `plan` for `items` items, or than the whole batch if
    /// nothing fits, the most first.
    ///
    /// The savings of recomputation and of parked state are those of other predictions. Others
    /// are what the peak holds for it, which is an upper bound but for the ends of pages.
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
        let (recorded, categories, state) = match plan {
            Some(report) => {
                let recorded = report.recomputed.is_none().then(as_recorded).transpose()?;
                let state = report.optimizer_state - report.parked;
                (recorded, report.categories, state)
            }
            None => {
                let recorded = as_recorded()?;
                let categories = recorded.categories;
                let state = categories.get(Category::OptimizerState);
                (Some(recorded), categories, state)
            }
        };
        let mut advice = Vec::new();
        let mut add = |what: String, saves: Bytes| {
            if saves > Bytes::ZERO {
                advice.push(Advice { what, saves });
            }
        };
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
            let what = format!("activations recomputed, for {percent:.0} % more time");
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
