//! Compares the largest micro-batch that fits a budget, found by trying, with the planned one.
//!
//! Trials get a fixed size and an unlimited budget, so that only the measurement says what fits.

use std::time::Duration;

use anyhow::{Context, bail};
use firebox::{Budget, Bytes};

use crate::child::Ended;
use crate::model::Subject;
use crate::real;
use crate::trial::{NO_LIMIT, Trial};

/// Settings of the search.
pub struct Search {
    /// Growth of the size from trial to trial, in per cent.
    pub stride: f64,
    /// Minimum number of micro-steps in a batch.
    pub steps: usize,
    /// Time limit of a trial.
    pub limit: Duration,
}

/// Result for one model and budget.
struct Found {
    planned: usize,
    predicted: Bytes,
    largest: usize,
}

impl Search {
    /// Prints a line for each model and budget, and one for scripts.
    pub fn run(&self, models: &[Subject], budgets: &[Budget]) -> anyhow::Result<()> {
        if real::NAME == "flex" {
            println!("not run: largest (this backend has no pages to measure)");
            return Ok(());
        }
        let mut result = format!("result: bench=largest target={}", real::NAME);
        let mut shares = Vec::new();
        for model in models {
            for budget in budgets {
                match self.one(*model, *budget) {
                    Ok(found) => {
                        let share = found.planned as f64 / found.largest as f64;
                        shares.push(share);
                        println!(
                            "{} in {budget}: planned {} ({} predicted), largest {}, share {share:.3}",
                            model.name(),
                            found.planned,
                            found.predicted,
                            found.largest,
                        );
                    }
                    Err(error) => println!("not run: {} in {budget}: {error:#}", model.name()),
                }
            }
        }
        shares.sort_by(f64::total_cmp);
        result += &format!(" cases={}", shares.len());
        if let [least, ..] = shares[..] {
            result += &format!(" least={least:.3} most={:.3}", shares[shares.len() - 1]);
        }
        println!("{result}");
        Ok(())
    }

    fn one(&self, model: Subject, budget: Budget) -> anyhow::Result<Found> {
        let Budget::Bytes(limit) = budget else {
            bail!("a budget has to be an amount, so that a measurement can be compared with it");
        };
        let (batch, planned, predicted) = self.plan(model, budget)?;
        let fits = |items: usize| self.fits(model, batch, items, limit);
        let mut largest = planned;
        if fits(planned)? {
            // Tries one more size after the first that does not fit, because pages can shrink as
            // sizes grow.
            let mut misses = 0;
            let mut size = planned;
            while misses < 2 && size < batch {
                size = self.grown(size).min(batch);
                if fits(size)? {
                    (largest, misses) = (size, 0);
                } else {
                    misses += 1;
                }
            }
        } else {
            loop {
                largest = (largest as f64 / (1.0 + self.stride / 100.0)) as usize;
                if largest == 0 {
                    bail!("not one item was measured to fit");
                }
                if fits(largest)? {
                    break;
                }
            }
        }
        Ok(Found { planned, predicted, largest })
    }

    fn grown(&self, items: usize) -> usize {
        ((items as f64 * (1.0 + self.stride / 100.0)) as usize).max(items + 1)
    }

    /// Finds a batch with enough micro-steps for an even split to come close to the largest size.
    /// Returns it with its plan.
    fn plan(&self, model: Subject, memory: Budget) -> anyhow::Result<(usize, usize, Bytes)> {
        let mut batch = self.steps;
        for _ in 0..20 {
            let trial = Trial { plan_only: true, ..Trial::new(model, batch, memory) };
            let ended = Ended::of(trial, self.limit)?;
            let planned = ended.number("planned:", "micro_batch");
            let planned = planned.with_context(|| format!("no plan: {}", ended.reason()))? as usize;
            if planned * self.steps <= batch {
                let predicted = ended.number("planned:", "predicted").unwrap_or(0);
                return Ok((batch, planned, Bytes::new(predicted)));
            }
            batch = planned * self.steps;
        }
        bail!("the plan does not settle; give a smaller budget")
    }

    /// Trains in micro-batches of `items` items and returns whether the pages stayed within
    /// `limit`.
    fn fits(
        &self,
        model: Subject,
        batch: usize,
        items: usize,
        limit: Bytes,
    ) -> anyhow::Result<bool> {
        let micro_batch = Some(items);
        let trial = Trial { micro_batch, ..Trial::new(model, batch, NO_LIMIT) };
        let ended = Ended::of(trial, self.limit)?;
        if !ended.succeeded() {
            println!("  {} of {items}: {}", model.name(), ended.reason());
            return Ok(false);
        }
        let reserved = ended.bytes("reserved").context("nothing was measured")?;
        let predicted = ended.bytes("predicted").unwrap_or(Bytes::ZERO);
        println!(
            "  {} of {items}: measured {reserved}, predicted {predicted} ({:.3}), {:.1} s",
            model.name(),
            predicted.ratio(reserved),
            ended.time.as_secs_f64(),
        );
        Ok(reserved <= limit)
    }
}
