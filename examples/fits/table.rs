//! The table that the example prints.

use comfy_table::{CellAlignment, Table, presets};
use firebox::Bytes;
use firebox::trace::{Footprint, Paging};

use crate::search::Fit;

/// Makes a table with one line per card.
pub fn of(found: &[Fit]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "card",
        "memory",
        "budget",
        "batch",
        "reserved",
        "live tensors",
        "pages",
        "unused",
        "largest buffer",
        "one item more",
    ]);
    for fit in found {
        let card =
            [fit.card.name().to_owned(), fit.card.memory().to_string(), fit.budget.to_string()];
        table.add_row(card.into_iter().chain(batch(fit)).chain([next(fit)]));
    }
    for column in 1..9 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The batch and how its memory is divided.
///
/// The difference between live tensors and reserved memory is lost in gaps, in pages of other
/// sizes, and to what operations allocate in addition.
fn batch(fit: &Fit) -> [String; 6] {
    let Some(paging) = fit.footprint.as_ref().and_then(|footprint| footprint.paging.as_ref())
    else {
        return [const { String::new() }; 6].map(|_| "-".into());
    };
    let unused = 100.0 * (1.0 - fit.live.ratio(paging.reserved));
    [
        fit.batch.to_string(),
        paging.reserved.to_string(),
        fit.live.to_string(),
        pages(paging),
        format!("{unused:.0} %"),
        share(paging),
    ]
}

/// The number of pages: those for steps and lasting ones, or all and those of the largest size.
fn pages(paging: &Paging) -> String {
    if let Some(pool) = &paging.pool {
        return format!("{} for steps, {} lasting", pool.step, pool.lasting);
    }
    let all: usize = paging.pages.values().sum();
    match paging.pages.last_key_value() {
        Some((size, count)) => format!("{all}, {count} of {size}"),
        None => all.to_string(),
    }
}

/// The largest buffer, as a share of the largest buffer that the card can hold.
fn share(paging: &Paging) -> String {
    let share = 100.0 * paging.largest_buffer.ratio(paging.largest_page);
    format!("{} ({share:.0} % of the limit)", paging.largest_buffer)
}

/// Why one item more does not fit.
fn next(fit: &Fit) -> String {
    let Some(next) = &fit.next else { return "not asked".into() };
    match &next.paging {
        Some(paging) if paging.is_refused() => {
            format!("a buffer of {} is over a quarter of the card", paging.largest_buffer)
        }
        None => "burn panics".into(),
        _ => format!("{} over the budget{}", next.peak - fit.budget, opened(fit, next)),
    }
}

/// The largest page that one item more opens, if it opens any.
fn opened(fit: &Fit, next: &Footprint) -> String {
    let (Some(now), Some(then)) =
        (fit.footprint.as_ref().and_then(|now| now.paging.as_ref()), &next.paging)
    else {
        return String::new();
    };
    let count = |paging: &Paging, size: &Bytes| paging.pages.get(size).copied().unwrap_or(0);
    let more = |size: &&Bytes| count(then, size) > count(now, size);
    match then.pages.keys().rev().find(more) {
        Some(size) => format!(": a page of {size}"),
        None => String::new(),
    }
}
