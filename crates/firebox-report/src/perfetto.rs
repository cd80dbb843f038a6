//! The report as events in the format of Chrome's tracer, which <https://ui.perfetto.dev> opens. An
//! operation takes a microsecond, because a trace knows no times.
//!
//! Format: "Trace Event Format", Google, 2016.

use serde_json::{Value, json};

use crate::device::{DeviceReport, ReportError};

/// The memory at each step as counters, and operations and modules as slices, for Perfetto.
///
/// # Errors
///
/// If they cannot be written as JSON.
pub fn perfetto(shown: &DeviceReport) -> Result<String, ReportError> {
    let story = &shown.story;
    let name = format!("{}, {} as {}", shown.device, shown.batch, shown.split);
    let mut events = vec![
        json!({ "ph": "M", "pid": 1, "name": "process_name", "args": { "name": name } }),
        json!({ "ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": { "name": "operations" } }),
        json!({ "ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": { "name": "modules" } }),
    ];
    for (at, operation) in story.names.iter().enumerate() {
        events.push(json!({
            "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": 1, "name": operation,
            "args": { "step": at, "module": story.of_steps[at] },
        }));
        events.extend(counters(shown, at));
    }
    events.extend(runs(&story.of_steps));
    for (at, mark) in &story.marks {
        events.push(json!({ "ph": "i", "s": "p", "pid": 1, "tid": 1, "ts": at, "name": mark }));
    }
    let all = json!({ "displayTimeUnit": "ns", "traceEvents": events });
    Ok(serde_json::to_string(&all)?)
}

/// The counters at a step, where one of them changes.
fn counters(shown: &DeviceReport, at: usize) -> Option<Value> {
    let story = &shown.story;
    let all = || {
        story
            .categories
            .iter()
            .map(|(name, series)| (&**name, series))
            .chain([("reserved", &story.reserved), ("tensors", &story.live)])
    };
    let changes = |(_, series): &(&str, &Vec<u64>)| at == 0 || series.get(at) != series.get(at - 1);
    all().any(|series| changes(&series)).then(|| {
        let args =
            all().filter_map(|(name, series)| Some((name.to_owned(), json!(series.get(at)?))));
        let args: serde_json::Map<String, Value> = args.collect();
        json!({ "ph": "C", "pid": 1, "ts": at, "name": "bytes", "args": args })
    })
}

/// Consecutive steps of one module as one slice.
fn runs(modules: &[Option<String>]) -> Vec<Value> {
    let mut slices = Vec::new();
    let mut begin = 0;
    for at in 1..=modules.len() {
        if at == modules.len() || modules[at] != modules[begin] {
            if let Some(module) = &modules[begin] {
                slices.push(json!({
                    "ph": "X", "pid": 1, "tid": 2, "ts": begin, "dur": at - begin, "name": module,
                }));
            }
            begin = at;
        }
    }
    slices
}
