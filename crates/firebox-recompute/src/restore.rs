//! Goes back to a trace as it was recorded, in the middle: what was dropped so far is made again.
//!
//! For a step that has begun with the recipe of another one, because both were the same up to a
//! read.

use firebox_trace::{OpIndex, Origin, Step, TensorIndex, Trace};

use crate::apply::{ApplyError, Rewriting, Version};
use crate::recipe::{Anchor, Edit, Made, Recipe};

/// The recipe for a trace whose steps before `from` are edited as `recipe` says, and whose further
/// steps run as recorded. At `from`, everything that is then alive as recorded is made
/// again.
///
/// At that step, tensors may take more than they take as recorded, by what is needed to make others
/// again.
///
/// # Errors
///
/// If the recipe is one for another trace, or it dropped what cannot be made again.
pub fn restore(trace: &Trace, recipe: &Recipe, from: Anchor) -> Result<Recipe, ApplyError> {
    let edits = recipe.until(from).edits;
    let mut rewriting = Rewriting::new(trace, recipe.drains);
    let end = trace.steps.len();
    let at = rewriting.anchors.step_at(from).map_or(end, |at| at.0 as usize);
    rewriting.run(&edits, at)?;
    let mut restoring = Restoring { trace, rewriting, before: from, edits };
    let alive = trace.alive_before(OpIndex(at as u32));
    for tensor in &alive {
        restoring.need(*tensor)?;
    }
    let is_alive = |tensor: &TensorIndex| alive.binary_search(tensor).is_ok();
    for tensor in restoring.there().into_iter().filter(|tensor| !is_alive(tensor)) {
        // A buffer stays for its views, in its own life and for theirs.
        if !restoring.rewriting.members_of(tensor).iter().any(is_alive) {
            restoring.end(tensor)?;
        }
    }
    restoring.rewriting.run(&[], end)?;
    restoring.before = restoring.rewriting.anchors.from(OpIndex(end as u32));
    let survivors = trace.survivors();
    for tensor in restoring.there() {
        if survivors.binary_search(&tensor).is_err() {
            restoring.end(tensor)?;
        }
    }
    Ok(Recipe { edits: restoring.edits, drains: recipe.drains })
}

struct Restoring<'a> {
    trace: &'a Trace,
    rewriting: Rewriting<'a>,
    before: Anchor,
    edits: Vec<Edit>,
}

impl Restoring<'_> {
    fn edit(&mut self, edit: Edit) -> Result<(), ApplyError> {
        self.rewriting.edit_now(edit)?;
        self.edits.push(edit);
        Ok(())
    }

    /// What is there.
    fn there(&self) -> Vec<TensorIndex> {
        let all = (0..self.trace.tensors.len() as u32).map(TensorIndex);
        let is_there = |tensor: &TensorIndex| {
            matches!(self.rewriting.version_of(*tensor), Version::Is(_) | Version::Packed(_))
        };
        all.filter(is_there).collect()
    }

    /// What makes a tensor.
    fn made(&self, tensor: TensorIndex) -> Result<(Made, &[firebox_trace::Use]), ApplyError> {
        let Origin::Made(at) = self.trace.tensor(tensor).origin else {
            return Err(ApplyError::Dropped { at: OpIndex(0), tensor });
        };
        let by = self.rewriting.anchors.from(at);
        match &self.trace.steps[at.0 as usize] {
            Step::Call(call) => {
                let result = call.outputs.iter().position(|output| *output == tensor);
                let result = result.ok_or(ApplyError::Contradiction(at))? as u32;
                Ok((Made { by, result }, &call.inputs))
            }
            _ => Ok((Made { by, result: 0 }, &[])),
        }
    }

    fn end(&mut self, tensor: TensorIndex) -> Result<(), ApplyError> {
        let (buffer, _) = self.made(tensor)?;
        self.edit(Edit::Drop { before: self.before, buffer })
    }

    /// Makes a tensor again if it is not there. Iterative, because a chain may be long.
    fn need(&mut self, tensor: TensorIndex) -> Result<(), ApplyError> {
        let before = self.before;
        let mut todo = vec![(tensor, false)];
        while let Some((tensor, has_inputs)) = todo.pop() {
            match self.rewriting.version_of(tensor) {
                Version::Is(_) => continue,
                Version::Packed(_) => {
                    let (mask, _) = self.made(tensor)?;
                    self.edit(Edit::Unpack { before, mask })?;
                    continue;
                }
                Version::Unborn | Version::Dropped | Version::Ended => {}
            }
            let (made, inputs) = self.made(tensor)?;
            if !has_inputs {
                let inputs = inputs.iter().rev().map(|input| (input.tensor, false));
                let inputs: Vec<_> = inputs.collect();
                todo.push((tensor, true));
                todo.extend(inputs);
                continue;
            }
            self.edit(Edit::Redo { before, call: made.by })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::apply::apply;
    use crate::check::check;
    use crate::cost::Demand;
    use crate::graphs::{bytes_at_peak, graphs};
    use crate::select::select;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_dropped_comes_back(graph in graphs(), at in any::<prop::sample::Index>()) {
            let trace = graph.trace;
            let limit = bytes_at_peak(&trace).scale(0.75);
            let Some(selected) = select(&trace, limit, &Demand::of(graph.costs)) else { return Ok(()) };
            let calls = trace.calls().count();
            let from = Anchor { step: at.index(calls + 1) as u32, reads: 0 };
            let restored = restore(&trace, &selected.recipe, from).expect("all of it comes back");
            let rewritten = apply(&trace, &restored).expect("it is a recipe for this trace");
            prop_assert_eq!(check(&trace, &rewritten), Ok(()));
            prop_assert_eq!(restored.until(from), selected.recipe.until(from));
            // What comes behind runs as recorded.
            let end = Anchor { step: calls as u32, reads: 0 };
            let is_between = |edit: &Edit| edit.before() > from && edit.before() < end;
            prop_assert!(!restored.edits.iter().any(is_between));
        }

        #[test]
        fn reads_move_no_edits(
            graph in graphs(),
            reads in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
            more in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            // The tensor that exists before is there all the time.
            let read = |trace: &Trace, places: &[prop::sample::Index]| {
                let mut trace = trace.clone();
                for place in places {
                    let used = firebox_trace::Use { tensor: TensorIndex(0), last: false };
                    trace.steps.insert(place.index(trace.steps.len() + 1), Step::Read(used));
                }
                trace.renumber_origins();
                trace
            };
            let known = read(&graph.trace, &reads);
            let costs = vec![1.0; known.steps.len()];
            let limit = bytes_at_peak(&known).scale(0.75);
            let Some(selected) = select(&known, limit, &Demand::of(costs)) else { return Ok(()) };
            for trace in [&known, &graph.trace, &read(&graph.trace, &more), &read(&known, &more)] {
                let rewritten = apply(trace, &selected.recipe).expect("its calls are the same");
                prop_assert_eq!(check(trace, &rewritten), Ok(()));
            }
        }
    }
}
