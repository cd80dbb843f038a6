//! `firebox diff`: what changed between two traces.

use std::collections::{BTreeMap, BTreeSet};

use comfy_table::Table;
use firebox::plan::{SavedTrace, Split};
use firebox::trace::{ModuleBytes, Modules};
use firebox::{Bytes, PlanReport};

use crate::args::DiffOptions;
use crate::plan::{Outcome, about, load};
use crate::table::table;
use crate::target::targets;
use crate::wrong_use;

/// `firebox diff`.
pub fn diff(options: &DiffOptions) -> anyhow::Result<Outcome> {
    if options.on.card.is_empty() {
        return Err(wrong_use("name the cards to compare on with `--card`, or `--card cpu`"));
    }
    let (before, after) = (load(&options.before)?, load(&options.after)?);
    println!("before: {}\nafter:  {}", about(&before), about(&after));
    let counts = [operations(&before, options.batch)?, operations(&after, options.batch)?];
    println!("{}", operations_table(&counts));
    let mut outcome = Outcome::Done;
    let (ones, others) = (targets(&options.on, &before)?, targets(&options.on, &after)?);
    for (one, other) in ones.iter().zip(&others) {
        println!("{}, a batch of {} within {}:", one.name, options.batch, one.budget());
        let plans = [one.plan(&before, options.batch)?, other.plan(&after, options.batch)?];
        if plans[1].is_err() {
            outcome = Outcome::DoesNotFit;
        }
        println!("{}", peak_table(&plans));
    }
    Ok(outcome)
}

/// How many operations each module takes in two iterations on the whole batch. As many as on the
/// batch that was recorded, if it has more items.
fn operations(trace: &SavedTrace, batch: usize) -> anyhow::Result<BTreeMap<String, usize>> {
    let items = batch.min(trace.about().items.max(1));
    let trace = trace.sample(Split::whole(items))?.trace;
    let modules = Modules::of(&trace);
    let mut counts = BTreeMap::new();
    for (at, _) in trace.calls() {
        *counts.entry(named(modules.step(at))).or_default() += 1;
    }
    Ok(counts)
}

fn named(module: Option<&str>) -> String {
    module.unwrap_or("(no module)").to_owned()
}

/// Modules that take another number of operations.
fn operations_table(counts: &[BTreeMap<String, usize>; 2]) -> String {
    let modules: BTreeSet<&String> = counts.iter().flat_map(BTreeMap::keys).collect();
    let changed = modules.into_iter().map(|module| {
        (module, counts.each_ref().map(|counts| counts.get(module).copied().unwrap_or_default()))
    });
    let changed: Vec<_> = changed.filter(|(_, [before, after])| before != after).collect();
    if changed.is_empty() {
        return "every module takes as many operations as before".to_owned();
    }
    let mut table = table(["module", "operations before", "after", "change"], 1..4);
    for (module, [before, after]) in changed {
        let change = format!("{:+}", after as i64 - before as i64);
        table.add_row([module.clone(), before.to_string(), after.to_string(), change]);
    }
    table.to_string()
}

/// The peak, by what it is for and by module.
fn peak_table(plans: &[Result<PlanReport, String>; 2]) -> String {
    let [before, after] = plans;
    let (before, after) = match (before, after) {
        (Ok(before), Ok(after)) => (before, after),
        (before, after) => {
            let line = |plan: &Result<PlanReport, String>| match plan {
                Ok(report) => report.line(),
                Err(message) => message.clone(),
            };
            return format!("before: {}\nafter:  {}", line(before), line(after));
        }
    };
    let mut table = table(["", "before", "after", "change"], 1..4);
    let splits = [before, after].map(|report| report.plan.split().to_string());
    table.add_row([
        "micro-batches".to_owned(),
        splits[0].clone(),
        splits[1].clone(),
        String::new(),
    ]);
    add(&mut table, "peak", before.predicted(), after.predicted());
    for ((category, one), (_, other)) in before.categories.iter().zip(after.categories.iter()) {
        if one != other {
            add(&mut table, &format!("  {category}"), one, other);
        }
    }
    let held = |modules: &[ModuleBytes]| {
        let held = modules.iter().map(|held| (named(held.module.as_deref()), held.bytes));
        held.collect::<BTreeMap<String, Bytes>>()
    };
    let [one, other] = [before, after].map(|report| held(&report.modules));
    let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    for name in names {
        let bytes = [&one, &other].map(|held| held.get(name).copied().unwrap_or_default());
        if bytes[0] != bytes[1] {
            add(&mut table, &format!("  in {name}"), bytes[0], bytes[1]);
        }
    }
    table.to_string()
}

fn add(table: &mut Table, name: &str, before: Bytes, after: Bytes) {
    let change = match after >= before {
        true => format!("+{}", after - before),
        false => format!("-{}", before - after),
    };
    table.add_row([name.to_owned(), before.to_string(), after.to_string(), change]);
}
