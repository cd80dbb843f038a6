//! Chooses what to drop and what to recompute.
//!
//! An offline form of dynamic tensor rematerialization (Kirisame et al., "Dynamic tensor
//! rematerialization", ICLR 2021): the program is walked once, and where tensors exceed the limit,
//! the buffer goes that is cheap to make again, large, and not needed for long. Unlike there, the
//! time of the next use is known.

use std::collections::BTreeMap;

use firebox_trace::{Bytes, Step, Trace};

use crate::cost::Demand;
use crate::lives::Lives;
use crate::recipe::Edit;
use crate::seeds::Seeds;
use crate::walk::{Selected, Walk, Weights};

/// How losses are weighed, in walks of which the best is taken: the exponents of the cost of a
/// buffer and of the time to its next use, and the share of what is missing for it in its cost.
const WEIGHTS: [Weights; 6] = [
    (1.0, 1.0, 1.0),
    (1.0, 1.0, 0.2),
    (0.5, 1.0, 1.0),
    (1.0, 0.5, 0.2),
    (2.0, 1.0, 0.2),
    (2.0, 0.5, 0.05),
];

/// How many times what must go at the peak seeds drop: other moments may need more.
const MORE: [f64; 8] = [1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5];

/// The weights where a seed is not enough.
const SEEDED: [Weights; 2] = [(1.0, 1.0, 0.2), (1.0, 0.5, 1.0)];

/// How many walks try to keep a buffer that is made again: as many as together have this many
/// steps, and no more than the second number.
const TRIALS: (usize, usize) = (1_500_000, 400);

/// Chooses a recipe with which tensors and workspace of `trace` take at most `limit` at once, if
/// one is found; otherwise the one that takes the least. None if everything that was tried repeats
/// calls that take more time than the whole trace. Within each micro-step of the trace tensors are
/// dropped and made again; a trace without micro-steps is taken as one.
///
/// # Panics
///
/// If the demand is not that of the trace.
pub fn select(trace: &Trace, limit: Bytes, demand: &Demand) -> Option<Selected> {
    let costs = demand.time.as_slice();
    assert_eq!(trace.steps.len(), costs.len(), "each step has a cost");
    assert_eq!(trace.steps.len(), demand.workspace.len(), "each step has a workspace");
    let lives = Lives::of(trace, demand.bools);
    let scan = |sum: &mut f64, cost: &f64| {
        *sum += cost;
        Some(*sum)
    };
    let clock: Vec<f64> = costs.iter().scan(0.0, scan).collect();
    let seeds = Seeds::of(&lives, demand, &clock);
    let walk = |begin: &Begin, keeps: &[bool]| {
        let mut walk = Walk::new(&lives, limit.get(), demand, &clock, begin.weights, keeps);
        walk.drop_after_gaps(&begin.seed, &seeds.gap);
        walk.run()
    };
    let nothing_kept = vec![false; trace.tensors.len()];
    let begins = begins(&seeds, limit).into_iter();
    let choices = begins.filter_map(|begin| Some((walk(&begin, &nothing_kept)?, begin)));
    let (best, begin) = choices
        .reduce(|best, other| if other.0.is_better(&best.0, limit) { other } else { best })?;
    let repeats = |best: &Selected| most_repeated(&lives, best, costs);
    let trials = (TRIALS.0 / trace.steps.len().max(1)).min(TRIALS.1);
    Some(keep(best, limit, nothing_kept, trials, repeats, |keeps| walk(&begin, keeps)))
}

/// How a walk begins.
struct Begin {
    /// The buffers that go in any case.
    seed: Vec<usize>,
    weights: Weights,
}

fn begins(seeds: &Seeds, limit: Bytes) -> Vec<Begin> {
    let unseeded = WEIGHTS.into_iter().map(|weights| Begin { seed: Vec::new(), weights });
    let mut begins: Vec<Begin> = unseeded.collect();
    for seed in MORE.into_iter().filter_map(|more| seeds.enough(limit.get(), more)) {
        let seeded = SEEDED.into_iter().map(|weights| Begin { seed: seed.clone(), weights });
        begins.extend(seeded);
    }
    begins
}

/// Keeps buffers that were made again, one after the other, as long as that is better.
fn keep(
    mut best: Selected,
    limit: Bytes,
    mut keeps: Vec<bool>,
    mut trials: usize,
    repeats: impl Fn(&Selected) -> Vec<usize>,
    walk: impl Fn(&[bool]) -> Option<Selected>,
) -> Selected {
    loop {
        let before = best.cost;
        for root in repeats(&best) {
            if trials == 0 || keeps[root] {
                continue;
            }
            trials -= 1;
            keeps[root] = true;
            match walk(&keeps).filter(|other| other.is_better(&best, limit)) {
                Some(other) => best = other,
                None => keeps[root] = false,
            }
        }
        if trials == 0 || best.cost >= before {
            return best;
        }
    }
}

impl Selected {
    fn is_better(&self, other: &Self, limit: Bytes) -> bool {
        match (self.peak <= limit, other.peak <= limit) {
            (true, true) => self.cost < other.cost,
            (false, false) => self.peak < other.peak,
            (fits, _) => fits,
        }
    }
}

/// The buffers that a choice makes again, those first whose repeats cost most.
fn most_repeated(lives: &Lives<'_>, selected: &Selected, costs: &[f64]) -> Vec<usize> {
    let mut spent: BTreeMap<usize, f64> = BTreeMap::new();
    for edit in &selected.recipe.edits {
        if let Edit::Redo { call, .. } = edit
            && let Some(call) = lives.anchors.step(*call)
            && let Step::Call(of) = &lives.trace.steps[call.0 as usize]
            && let Some(output) = of.outputs.first()
        {
            *spent.entry(lives.root(*output)).or_default() += costs[call.0 as usize];
        }
    }
    let mut roots: Vec<(usize, f64)> = spent.into_iter().collect();
    roots.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    roots.into_iter().map(|(root, _)| root).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apply::apply;
    use crate::check::check;

    use crate::graphs::{Graph, bytes_at_peak, cheapest, graphs};
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_checker_accepts_what_is_selected(graph in graphs(), share in 0.2_f64..1.0) {
            let Graph { trace, costs } = graph;
            let limit = bytes_at_peak(&trace).scale(share);
            let Some(selected) = select(&trace, limit, &Demand::of(costs.clone())) else { return Ok(()) };
            let rewritten = apply(&trace, &selected.recipe).expect("it is a recipe for this trace");
            check(&trace, &rewritten).expect("values stay what they are");
            prop_assert_eq!(bytes_at_peak(&rewritten.trace), selected.peak);
        }

        #[test]
        fn the_choice_is_not_below_the_cheapest(graph in graphs(), share in 0.4_f64..1.0) {
            let Graph { trace, costs } = graph;
            let limit = bytes_at_peak(&trace).scale(share);
            let Some(selected) = select(&trace, limit, &Demand::of(costs.clone())) else { return Ok(()) };
            if selected.peak <= limit {
                let best = cheapest(&trace, limit, &costs).expect("something is feasible");
                prop_assert!(selected.cost >= best - 1e-9, "{} is below {best}", selected.cost);
            }
        }
    }

    /// How far the choice is from the cheapest one, over many graphs.
    #[test]
    fn the_choice_is_close_to_the_cheapest() {
        let mut runner = TestRunner::deterministic();
        let (mut feasible, mut found, mut repeats, mut ratios) = (0, 0, 0, Vec::new());
        for round in 0..3000 {
            let tree = graphs().new_tree(&mut runner).expect("a graph");
            let Graph { trace, costs } = tree.current();
            let limit = bytes_at_peak(&trace).scale(0.5 + 0.1 * f64::from(round % 5));
            let Some(best) = cheapest(&trace, limit, &costs) else { continue };
            let Some(selected) = select(&trace, limit, &Demand::of(costs.clone())) else {
                continue;
            };
            feasible += 1;
            if selected.peak > limit {
                continue;
            }
            found += 1;
            if best > 0.0 {
                repeats += 1;
                ratios.push(selected.cost / best);
            }
        }
        ratios.sort_by(f64::total_cmp);
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        let worst = ratios.last().copied().unwrap_or_default();
        println!(
            "{found} of {feasible} feasible limits are reached, {repeats} with repeats: {mean:.3} times the cheapest in the \
             mean, {worst:.2} at the worst"
        );
        assert!(repeats > 100, "{repeats} graphs say something");
        assert!(found as f64 >= 0.9 * f64::from(feasible), "{found} of {feasible}");
        assert!(mean < 1.3, "{mean}");
    }
}
