//! `firebox plan` and `firebox largest`.

use anyhow::Context;
use comfy_table::Table;
use firebox::plan::{Advice, LoadError, SavedTrace};
use firebox::{Bytes, PlanReport};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::args::{LargestOptions, PlanOptions, StepOptions};
use crate::table::table;
use crate::target::{Target, is_of_burn_0_22, park, targets, targets_of};

/// How a command ends that did its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All is well.
    Done,
    /// A batch does not fit a card.
    DoesNotFit,
}

/// Reads a trace.
pub fn load(path: &std::path::Path) -> anyhow::Result<SavedTrace> {
    let loaded = SavedTrace::load(path);
    if let Err(LoadError::Unreadable { .. }) = &loaded {
        // It names the file.
        return Ok(loaded?);
    }
    loaded.with_context(|| path.display().to_string())
}

/// Does `work` for all targets at once, with a bar on a terminal.
pub fn for_all<'a, T: Send>(
    targets: &'a [Target],
    work: impl Fn(&'a Target) -> T + Sync,
) -> anyhow::Result<Vec<T>> {
    let style =
        ProgressStyle::with_template("planning {bar:24} {pos} of {len} devices, {elapsed}")?;
    let bar = ProgressBar::new(targets.len() as u64).with_style(style);
    let all = targets.par_iter().map(|target| {
        let done = work(target);
        bar.inc(1);
        done
    });
    let all = all.collect();
    bar.finish_and_clear();
    Ok(all)
}

/// `firebox plan`.
pub fn plan(options: &PlanOptions) -> anyhow::Result<Outcome> {
    let StepOptions { trace: path, batch, .. } = &options.step;
    let trace = load(path)?;
    let mut targets = targets_of(&options.step, &trace)?;
    if options.checkpoint {
        for target in &mut targets {
            target.planner = target.planner.clone().with_checkpoint();
        }
    }
    let found = for_all(&targets, |target| -> anyhow::Result<_> {
        let plan = target.plan(&trace, *batch)?;
        let advice = match options.advise {
            true => target.planner.advice(&trace, *batch, plan.as_ref().ok())?,
            false => Vec::new(),
        };
        Ok((target, plan, advice))
    })?;
    let found: Vec<Found<'_>> = found.into_iter().collect::<Result<_, _>>()?;
    let fits = found.iter().all(|(_, plan, _)| plan.is_ok());
    let outcome = if fits { Outcome::Done } else { Outcome::DoesNotFit };
    if options.json {
        let plans: Vec<Value> =
            found.iter().map(|(t, plan, advice)| json(t, plan, advice)).collect();
        let about = trace.about();
        let all = json!({ "model": about.model, "batch": batch, "plans": plans });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(outcome);
    }
    println!("{} of {}, a batch of {batch} items:", about(&trace), path.display());
    println!("{}", plans_table(&found));
    for (text, devices) in &by_text(&found) {
        println!("{}: {text}", devices.join(", "));
    }
    Ok(outcome)
}

/// The model in a few words.
pub fn about(trace: &SavedTrace) -> String {
    let about = trace.about();
    let other = match is_of_burn_0_22(trace) {
        true => " (recorded on burn 0.22, predicted as burn 0.21 would run it)",
        false => "",
    };
    format!("{} with {} of parameters{other}", about.model, about.parameters)
}

type Found<'a> = (&'a Target, Result<PlanReport, String>, Vec<Advice>);

/// What there is to say, and of which devices.
fn by_text<'a>(found: &'a [Found<'_>]) -> Vec<(String, Vec<&'a str>)> {
    let mut said: Vec<(String, Vec<&str>)> = Vec::new();
    for (target, plan, advice) in found {
        let texts = plan.as_ref().err().cloned().into_iter();
        for text in texts.chain(advice.iter().map(ToString::to_string)) {
            match said.iter_mut().find(|(known, _)| *known == text) {
                Some((_, devices)) => devices.push(&target.name),
                None => said.push((text, vec![&target.name])),
            }
        }
    }
    said
}

fn plans_table(found: &[Found<'_>]) -> Table {
    let heads = ["device", "budget", "micro-batches", "peak", "in use", "estimate"];
    let mut table = table(heads, [1, 3, 4]);
    for (target, plan, _) in found {
        let start = [target.name.clone(), target.budget().to_string()];
        let rest = match plan {
            Ok(report) => [
                split_of(report),
                report.predicted().to_string(),
                in_use(report).to_string(),
                report.estimate.to_string(),
            ],
            Err(_) => ["does not fit", "", "", ""].map(str::to_owned),
        };
        table.add_row(start.into_iter().chain(rest));
    }
    table
}

/// How a batch is split, what recomputation costs, and what is parked.
fn split_of(report: &PlanReport) -> String {
    let mut split = report.plan.split().to_string();
    if let Some(again) = report.recomputed {
        split += &format!(", recompute +{:.0} %", 100.0 * again.overhead);
    }
    if report.parked > Bytes::ZERO {
        split += &format!(", {} parked", report.parked);
    }
    split
}

/// The bytes in use at the peak.
pub fn in_use(report: &PlanReport) -> Bytes {
    report.paging.as_ref().map_or(report.predicted(), |paging| paging.in_use)
}

fn json(target: &Target, plan: &Result<PlanReport, String>, advice: &[Advice]) -> Value {
    let mut value = json!({
        "device": target.name,
        "allocator": target.allocator,
        "budget": target.budget(),
        "fits": plan.is_ok(),
    });
    match plan {
        Err(message) => value["message"] = json!(message),
        Ok(report) => {
            let categories = report.categories.iter();
            let categories: serde_json::Map<String, Value> =
                categories.map(|(category, bytes)| (category.to_string(), json!(bytes))).collect();
            value["split"] = json!(report.plan.split().to_string());
            value["micro_batches"] = json!(report.plan.len());
            value["micro_batch"] = json!(report.micro_batch());
            if let Some(again) = report.recomputed {
                value["recompute"] = json!({
                    "repeats": again.repeats,
                    "operations": again.operations,
                    "overhead": again.overhead,
                });
            }
            if report.parked > Bytes::ZERO {
                value["parked"] = json!(report.parked);
            }
            value["peak"] = json!(report.predicted());
            value["in_use"] = json!(in_use(report));
            value["estimate"] = json!(report.estimate);
            value["operation"] = json!(report.operation);
            value["categories"] = Value::Object(categories);
            let modules = report.modules.iter();
            let modules = modules.map(|held| json!({ "module": held.module, "bytes": held.bytes }));
            value["modules"] = modules.collect();
            value["unaccounted"] = json!(report.unaccounted);
        }
    }
    if !advice.is_empty() {
        let advice = advice.iter();
        let advice = advice.map(|advice| json!({ "what": advice.what, "saves": advice.saves }));
        value["advice"] = advice.collect();
    }
    value
}

/// `firebox largest`.
pub fn largest(options: &LargestOptions) -> anyhow::Result<Outcome> {
    let trace = load(&options.trace)?;
    let mut targets = targets(&options.on, &trace)?;
    if options.park {
        park(&mut targets);
    }
    let found = for_all(&targets, |target| match options.recompute {
        true => target.planner.largest_batch_recomputed(&trace),
        false => target.planner.largest_batch(&trace),
    })?;
    let found: Vec<usize> = found.into_iter().collect::<Result<_, _>>()?;
    let outcome = if found.contains(&0) { Outcome::DoesNotFit } else { Outcome::Done };
    if options.json {
        let devices = targets.iter().zip(&found);
        let devices = devices.map(|(target, items)| {
            json!({ "device": target.name, "budget": target.budget(), "batch": items })
        });
        let all = json!({ "model": trace.about().model, "devices": devices.collect::<Value>() });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(outcome);
    }
    let mut table = table(["device", "budget", "largest batch"], [1, 2]);
    for (target, items) in targets.iter().zip(&found) {
        table.add_row([target.name.clone(), target.budget().to_string(), items.to_string()]);
    }
    let again = if options.recompute { ", with recomputation" } else { "" };
    let parked = if options.park { ", optimizer state parked" } else { "" };
    println!("{}, not split{again}{parked}:", about(&trace));
    println!("{table}");
    Ok(outcome)
}
