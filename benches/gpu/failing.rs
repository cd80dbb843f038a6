//! What happens when a step needs more memory than there is. The trials get a budget far above the
//! real memory.

use std::time::Duration;

use crate::child::Ended;
use crate::model::Subject;
use crate::real;
use crate::trial::{NO_LIMIT, Trial, UNNOTICED};

/// Prints how each trial ended, and a line for scripts.
///
/// The wanted end is an error. A false success, a failure that only this bench noticed, a crash and
/// a hang are defects.
pub fn run(model: Subject, items: &[usize], limit: Duration) -> anyhow::Result<()> {
    if real::NAME == "flex" {
        println!("not run: out-of-memory (the host's memory would run out)");
        return Ok(());
    }
    let mut result = format!("result: bench=out-of-memory target={}", real::NAME);
    for items in items {
        let trial = Trial { micro_batch: Some(*items), ..Trial::new(model, *items, NO_LIMIT) };
        let ended = Ended::of(trial, limit)?;
        let outcome = outcome(&ended);
        let seconds = ended.time.as_secs_f64();
        println!("{} of {items}: {outcome} in {seconds:.1} s: {}", model.name(), ended.reason());
        result += &format!(" items{items}={outcome}");
    }
    println!("{result}");
    Ok(())
}

/// The end of a trial in one word.
fn outcome(ended: &Ended) -> &'static str {
    match ended.status.map(|status| status.code()) {
        None => "hang",
        Some(Some(0)) => "success",
        Some(Some(1)) if ended.text.contains(UNNOTICED) => "unnoticed",
        // The exit code of a `main` that returns an error.
        Some(Some(1)) => "error",
        Some(Some(101)) => "panic",
        Some(_) => "crash",
    }
}
