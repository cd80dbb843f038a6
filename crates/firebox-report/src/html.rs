//! The report as one HTML file: the page's parts, and its data as JSON.

use firebox_trace::Bytes;
use serde::Serialize;

use crate::device::{DeviceReport, ReportError};
use crate::story::Held;

const TEMPLATE: &str = include_str!("view/template.html");
const STYLE: &str = include_str!("view/style.css");
const VIEW: &str = include_str!("view/view.js");

#[derive(Serialize)]
struct Data<'a> {
    title: &'a str,
    subtitle: &'a str,
    plans: Vec<Plan<'a>>,
}

/// One device. Series hold the first value, and for each further one the difference to the one
/// before it.
#[derive(Serialize)]
struct Plan<'a> {
    card: &'a str,
    allocator: &'a str,
    batch: usize,
    split: String,
    micro_batches: usize,
    fits: bool,
    message: &'a str,
    budget: u64,
    peak: u64,
    in_use: u64,
    estimate: String,
    steps: usize,
    names: Vec<&'a str>,
    /// For each step, its place among the names.
    ops: Vec<usize>,
    reserved: Vec<i64>,
    live: Vec<i64>,
    categories: Vec<Series<'a>>,
    modules: Vec<Series<'a>>,
    marks: Vec<Marked<'a>>,
    peak_at: usize,
    tensors: &'a [Held],
    pages: Vec<Page<'a>>,
    advice: Vec<Advice<'a>>,
}

#[derive(Serialize)]
struct Series<'a> {
    name: &'a str,
    bytes: Vec<i64>,
}

#[derive(Serialize)]
struct Marked<'a> {
    at: usize,
    name: &'a str,
}

#[derive(Serialize)]
struct Page<'a> {
    name: &'a str,
    bytes: u64,
    buffers: Vec<(u64, u64, String)>,
}

#[derive(Serialize)]
struct Advice<'a> {
    what: &'a str,
    saves: u64,
}

/// One page about all devices, without anything to load.
///
/// # Errors
///
/// If the data cannot be written as JSON.
pub fn html(title: &str, subtitle: &str, shown: &[DeviceReport]) -> Result<String, ReportError> {
    let data = Data { title, subtitle, plans: shown.iter().map(plan).collect() };
    // Nothing in a name may end the script.
    let data = serde_json::to_string(&data)?.replace('<', "\\u003c");
    let page = TEMPLATE.replace("/*STYLE*/", STYLE).replace("/*VIEW*/", VIEW);
    Ok(page.replace("/*DATA*/null", &data))
}

fn plan(shown: &DeviceReport) -> Plan<'_> {
    let (story, footprint) = (&shown.story, &shown.footprint);
    let mut names: Vec<&str> = Vec::new();
    let mut known = std::collections::HashMap::new();
    let ops = story.names.iter().map(|name| {
        *known.entry(&**name).or_insert_with(|| {
            names.push(name);
            names.len() - 1
        })
    });
    let ops: Vec<usize> = ops.collect();
    Plan {
        card: &shown.device,
        allocator: &shown.allocator,
        batch: shown.batch,
        split: shown.split.to_string(),
        micro_batches: shown.split.len(),
        fits: shown.message.is_none(),
        message: shown.message.as_deref().unwrap_or_default(),
        budget: shown.budget.get(),
        peak: shown.peak.get(),
        in_use: footprint.paging.as_ref().map_or(footprint.peak, |paging| paging.in_use).get(),
        estimate: footprint.estimate.to_string(),
        steps: story.names.len(),
        names,
        ops,
        reserved: differences(&story.reserved),
        live: differences(&story.live),
        categories: story.categories.iter().map(series_of).collect(),
        modules: story.modules.iter().map(series_of).collect(),
        marks: story.marks.iter().map(|(at, name)| Marked { at: *at, name }).collect(),
        peak_at: story.peak_at,
        tensors: &story.tensors,
        pages: shown.pages.iter().map(page_of).collect(),
        advice: shown.advice.iter().map(advice).collect(),
    }
}

fn series_of((name, bytes): &(String, Vec<u64>)) -> Series<'_> {
    Series { name, bytes: differences(bytes) }
}

/// The first value, and the differences that follow.
fn differences(values: &[u64]) -> Vec<i64> {
    let mut before = 0;
    let difference = |value: &u64| {
        let difference = *value as i64 - before;
        before = *value as i64;
        difference
    };
    values.iter().map(difference).collect()
}

fn page_of(page: &crate::page::Page) -> Page<'_> {
    let buffers = page.buffers.iter().map(|buffer| {
        let size = Bytes::new(buffer.size);
        let label = match &buffer.tensor {
            Some(tensor) => format!("{tensor}, {size}"),
            None => format!("a buffer of {size}"),
        };
        (buffer.offset, buffer.size, label)
    });
    Page { name: page.name, bytes: page.bytes, buffers: buffers.collect() }
}

fn advice(advice: &firebox_plan::Advice) -> Advice<'_> {
    Advice { what: &advice.what, saves: advice.saves.get() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_add_up_to_the_values() {
        let values = [7, 7, 3, 900, 0];
        let sums = differences(&values).into_iter().scan(0, |sum, difference| {
            *sum += difference;
            Some(*sum as u64)
        });
        assert_eq!(sums.collect::<Vec<_>>(), values);
    }

    #[test]
    fn the_template_has_each_place_once() {
        for place in ["/*STYLE*/", "/*VIEW*/", "/*DATA*/null"] {
            assert_eq!(TEMPLATE.matches(place).count(), 1, "{place}");
        }
    }
}
