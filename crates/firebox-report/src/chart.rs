//! The report as a picture: what is reserved and in use at each step, stacked by category.

use std::path::Path;
use std::sync::OnceLock;

use firebox_trace::Category;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::device::{DeviceReport, ReportError};

/// Width and height in pixels.
const SIZE: (u32, u32) = (1200, 640);

/// Colours that can be told apart without seeing all of them (Okabe and Ito, 2008).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(86, 180, 233),
    RGBColor(150, 150, 150),
    RGBColor(210, 210, 210),
];

const MIB: f64 = 1048576.0;

/// A chart of what is reserved and in use at each step, as SVG.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn svg(shown: &DeviceReport) -> Result<String, ReportError> {
    with_font()?;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(&area, shown).map_err(|error| ReportError::Chart(error.to_string()))?;
    }
    Ok(text)
}

/// Writes the same chart as PNG.
///
/// # Errors
///
/// If it cannot be drawn or written.
pub fn png(shown: &DeviceReport, path: &Path) -> Result<(), ReportError> {
    with_font()?;
    let area = BitMapBackend::new(path, SIZE).into_drawing_area();
    draw(&area, shown).map_err(|error| {
        let cause = std::io::Error::other(error.to_string());
        ReportError::Unwritable { path: path.to_owned(), cause }
    })
}

/// Brings a font along, because a machine without a screen often has none.
fn with_font() -> Result<(), ReportError> {
    static FONT: OnceLock<bool> = OnceLock::new();
    let font = epaint_default_fonts::UBUNTU_LIGHT;
    let is_there =
        FONT.get_or_init(|| register_font("sans-serif", FontStyle::Normal, font).is_ok());
    if *is_there { Ok(()) } else { Err(ReportError::Chart("the font cannot be read".into())) }
}

type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn draw<B: DrawingBackend>(area: &DrawingArea<B, Shift>, shown: &DeviceReport) -> Drawn<B> {
    let story = &shown.story;
    let steps = story.names.len().max(1);
    let stacked = stacked(shown);
    let top = stacked.last().map_or(&[][..], |(_, sums)| &sums[..]);
    let most = top.iter().chain(&story.reserved).chain(&story.live).max();
    let most = most.copied().unwrap_or_default() as f64 / MIB;
    area.fill(&WHITE)?;
    let title = format!(
        "{}: a batch of {} as {}, {} at the peak",
        shown.device, shown.batch, shown.split, shown.peak
    );
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(84)
        .build_cartesian_2d(0..steps, 0.0..most * 1.08)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 15))
        .x_desc("operation")
        .y_desc("MiB")
        .draw()?;
    // The sums of all categories first, so that each smaller one covers its part.
    for (name, sums) in stacked.iter().rev() {
        let colour = colour_of(name);
        let points = sums.iter().enumerate().map(|(at, bytes)| (at, *bytes as f64 / MIB));
        chart
            .draw_series(AreaSeries::new(points, 0.0, colour.filled()))?
            .label(*name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 14, y + 6)], colour.filled()));
    }
    let lines =
        [("reserved", &story.reserved, BLACK), ("tensors", &story.live, RGBColor(90, 90, 90))];
    for (name, series, colour) in lines {
        let points = series.iter().enumerate().map(|(at, bytes)| (at, *bytes as f64 / MIB));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(("sans-serif", 15))
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    area.present()
}

/// The colour of a category, the same in all charts.
fn colour_of(category: &str) -> RGBColor {
    let index = Category::ALL.iter().position(|of| of.name() == category);
    index.and_then(|index| COLOURS.get(index)).copied().unwrap_or(BLACK)
}

/// The categories that hold anything, each with the sums up to it.
fn stacked(shown: &DeviceReport) -> Vec<(&str, Vec<u64>)> {
    let mut sums = vec![0; shown.story.names.len()];
    let filled = |series: &&(String, Vec<u64>)| series.1.iter().any(|bytes| *bytes > 0);
    let stacked = shown.story.categories.iter().filter(filled).map(|(name, series)| {
        sums.iter_mut().zip(series).for_each(|(sum, bytes)| *sum += bytes);
        (&**name, sums.clone())
    });
    stacked.collect()
}
