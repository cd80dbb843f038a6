//! `firebox report`: writes a picture of where a step's memory goes.

use std::path::Path;

use anyhow::Context;
use firebox::plan::SavedTrace;
use firebox_report::{DeviceReport, html, perfetto, png, svg};

use crate::args::ReportOptions;
use crate::plan::{Outcome, about, for_all, load};
use crate::target::{Target, targets_of};
use crate::wrong_use;

/// The kinds of files that are written.
enum Kind {
    Html,
    Svg,
    Png,
    Perfetto,
}

impl Kind {
    fn of(path: &Path) -> anyhow::Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("html" | "htm") => Ok(Self::Html),
            Some("svg") => Ok(Self::Svg),
            Some("png") => Ok(Self::Png),
            Some("json") => Ok(Self::Perfetto),
            _ => Err(wrong_use(format!(
                "{} ends in none of .html, .svg, .png and .json",
                path.display()
            ))),
        }
    }
}

/// `firebox report`.
pub fn report(options: &ReportOptions) -> anyhow::Result<Outcome> {
    let kind = Kind::of(&options.output)?;
    let step = &options.step;
    let trace = load(&step.trace)?;
    if step.on.card.is_empty() {
        return Err(wrong_use(
            "name the cards to draw with `--card`, or `--card cpu`; `firebox cards` lists them",
        ));
    }
    let targets = targets_of(step, &trace)?;
    if !matches!(kind, Kind::Html) && targets.len() > 1 {
        return Err(wrong_use("such a file shows one card; an .html file shows several"));
    }
    let shown = for_all(&targets, |target| show(target, &trace, step.batch))?;
    let shown: Vec<DeviceReport> = shown.into_iter().collect::<Result<_, _>>()?;
    let path = &options.output;
    let title = step.trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let subtitle = format!("{}, recorded by firebox {}", about(&trace), trace.about().firebox);
    let text = match kind {
        Kind::Html => html(&title, &subtitle, &shown)?,
        Kind::Svg => svg(&shown[0])?,
        Kind::Perfetto => perfetto(&shown[0])?,
        Kind::Png => {
            png(&shown[0], path)?;
            return Ok(written(path, &shown));
        }
    };
    std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(written(path, &shown))
}

fn written(path: &Path, shown: &[DeviceReport]) -> Outcome {
    eprintln!("wrote {}", path.display());
    let fits = shown.iter().all(|shown| shown.message.is_none());
    if fits { Outcome::Done } else { Outcome::DoesNotFit }
}

fn show(target: &Target, trace: &SavedTrace, batch: usize) -> anyhow::Result<DeviceReport> {
    let device = (&*target.name, target.allocator);
    let lifetimes = |steps: &firebox::trace::Trace| match &target.pooled {
        Some(model) => model.lifetimes(steps),
        None => Ok(Default::default()),
    };
    Ok(DeviceReport::new(device, &target.planner, trace, batch, lifetimes)?)
}
