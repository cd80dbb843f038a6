//! What ways to train with less memory cost in time, and whether they keep to what was predicted.

use std::time::Duration;

use firebox::{Budget, Bytes};

use crate::child::Ended;
use crate::model::Subject;
use crate::real;
use crate::trial::{NO_LIMIT, Trial};

/// Prints the time of a step in each way, over that of the whole batch with firebox, and a line for
/// scripts.
pub fn run(model: Subject, items: usize, timed: usize, limit: Duration) -> anyhow::Result<()> {
    let whole = Trial { micro_batch: Some(items), timed, ..Trial::new(model, items, NO_LIMIT) };
    let name = model.name();
    let mut result = format!("result: bench=costs target={} model={name}", real::NAME);
    let mut show = |way: &str,
                    trial: Trial,
                    base: Option<u64>|
     -> anyhow::Result<Option<[u64; 2]>> {
        let ended = Ended::of(trial, limit)?;
        let number = |key| ended.number("measured:", key);
        let Some(step) = number("step_us").filter(|_| ended.succeeded()) else {
            println!("{name} {way}: {}", ended.reason());
            return Ok(None);
        };
        let predicted = number("predicted").unwrap_or(0);
        let bytes = |key| number(key).map_or_else(|| "-".into(), |n| Bytes::new(n).to_string());
        let ratio = step as f64 / base.unwrap_or(step) as f64;
        println!(
            "{name} {way}: {:.1} ms a step ({ratio:.3}), micro-batch {}, predicted {}, for the run {}, measured {}, {:.1} % more time predicted, {:.0} s in all",
            step as f64 / 1e3,
            number("micro_batch").unwrap_or(0),
            bytes("predicted"),
            bytes("most"),
            bytes("reserved"),
            number("slower").unwrap_or(0) as f64 / 100.0,
            ended.time.as_secs_f64(),
        );
        result += &format!(" {way}={ratio:.3}");
        Ok(Some([step, predicted]))
    };
    let Some([step, most]) = show("whole", whole, None)? else { return Ok(()) };
    let within = |share: f64| Budget::Bytes(Bytes::new(most).scale(share));
    let again = |share| Trial { memory: within(share), recompute: true, ..whole };
    let ways = [
        ("burn", Trial { plain: true, ..whole }),
        ("split2", Trial { micro_batch: Some(items.div_ceil(2)), ..whole }),
        ("split4", Trial { micro_batch: Some(items.div_ceil(4)), ..whole }),
        ("recompute75", again(0.75)),
        ("recompute60", again(0.6)),
        ("parked", Trial { park: true, ..whole }),
        ("half", Trial { half: true, ..whole }),
    ];
    for (way, trial) in ways {
        show(way, trial, Some(step))?;
    }
    println!("{result}");
    Ok(())
}
